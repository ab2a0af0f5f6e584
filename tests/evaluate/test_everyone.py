"""All targets in turn, a test set of all clients, and all rows at one client."""

import json
from dataclasses import replace

import numpy as np
import pytest

import fedvlm
from fedvlm.errors import SettingsError
from fedvlm.evaluate.protocols.own_test import EVERYONE
from fedvlm.report.runs import has_unseen_scores
from fedvlm.report.tables import client_scores, compare_table, run_label

QUICK = {"name": "fedavg", "rounds": 2}
OWN_TEST = {"protocol": "own-test"}


def test_every_domain_is_the_target_in_turn(rows, tmp_path):
    combined = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", protocol="source-target", target="each")
    table = combined.tables[0]
    for name in ("art", "photo", "sketch"):
        alone = fedvlm.run(QUICK, embedded=rows, out=tmp_path / name, protocol="source-target", target=name).tables[0]
        assert {key: table[f"{key}, target {name}"] for key in alone} == alone
    three = [table[f"target accuracy, target {name}"] for name in ("art", "photo", "sketch")]
    assert table["target accuracy"] == pytest.approx(np.mean(three))
    assert "target accuracy" in compare_table([combined]) and "target art" not in compare_table([combined])


def test_each_needs_domains(rows, tmp_path):
    with pytest.raises(SettingsError, match="every domain in turn"):
        fedvlm.run(
            QUICK,
            embedded=rows,
            out=tmp_path / "a",
            protocol="source-target",
            target="each",
            clients={"partition": "iid", "count": 3},
        )


def test_a_client_of_its_own_is_the_target(rows, tmp_path):
    result = fedvlm.run(
        QUICK,
        embedded=rows,
        out=tmp_path / "a",
        protocol="source-target",
        target="client-2",
        clients={"partition": "iid", "count": 3},
    )
    about = result.trainings()["client-2"]
    assert (about["train"], about["unseen"]) == (["client-0", "client-1"], ["client-2"])
    assert result.tables[0]["target accuracy"] > 0.25


def test_what_is_shared_is_tested_on_the_test_rows_of_all(rows, tmp_path):
    plain = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", **OWN_TEST)
    result = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "b", global_test=True, **OWN_TEST)
    assert "global" not in plain.tables[0]
    rest = {key: value for key, value in result.tables[0].items() if key != "global"}
    assert rest == plain.tables[0]  # it changes nothing else
    scores = result.trainings()["all"]["scores"]
    own_scores = [scores[id] for id in ("art", "photo", "sketch")]
    # FedAvg's clients all have the shared model: together they are everyone.
    for key in ("test_rows", "test_hits"):
        assert scores[EVERYONE][key] == sum(client_scores[key] for client_scores in own_scores)
    assert result.tables[0]["global"] == scores[EVERYONE]["test_hits"] / scores[EVERYONE]["test_rows"]


def test_the_client_of_all_test_rows_is_told_wherever_unseen_ones_are(rows, tmp_path):
    result = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", global_test=True, **OWN_TEST)
    unseen_rows = [row for row in client_scores(result) if row["unseen"]]
    assert [row["client"] for row in unseen_rows] == [EVERYONE]
    assert unseen_rows[0]["accuracy"] == result.tables[0]["global"]


def test_a_site_s_name_makes_no_run_one_of_unseen_clients(rows, tmp_path):
    named = replace(rows, domains=np.char.replace(rows.domains, "art", "tartu"))
    result = fedvlm.run(QUICK, embedded=named, out=tmp_path / "a", **OWN_TEST)
    assert not has_unseen_scores(result)


def test_a_record_of_a_client_without_training_rows_is_json_for_everybody(rows, tmp_path):
    result = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", global_test=True, **OWN_TEST)

    def refuse(word):
        raise AssertionError(word)

    for path in sorted(result.folder.rglob("*.json*")):
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(text, parse_constant=refuse)


def test_a_method_that_shares_nothing_has_no_global_test(rows, tmp_path):
    alone = {"name": "fedot-all-local", "rounds": 1}
    result = fedvlm.run(alone, embedded=rows, out=tmp_path / "a", global_test=True, **OWN_TEST)
    assert result.tables[0]["global"] is None
    with pytest.raises(SettingsError, match="global_test = True is for protocol = 'own-test'"):
        fedvlm.run(QUICK, embedded=rows, out=tmp_path / "b", global_test=True)


def test_a_centralised_run_is_the_method_on_all_rows_at_one_client(rows, rows_like, tmp_path):
    result = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", centralised=True, **OWN_TEST)
    assert "centralised" in run_label(result)
    about = result.trainings()["all"]
    assert about["train"] == ["pooled"]
    # One client of its own with the same rows learns the same.
    federated = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "b", **OWN_TEST)
    shared, _ = result.outcome("all", 0)
    assert any(not value.equal(federated.outcome("all", 0)[0][key]) for key, value in shared.items())
    assert set(result.tables[0]) == set(federated.tables[0])


def test_everyone_has_what_the_one_client_learnt_for_itself(rows, tmp_path):
    """A method of local tensors alone would else be measured without having learnt."""
    alone = {"name": "fedot-all-local", "rounds": 20, "lr": 0.05}
    result = fedvlm.run(alone, embedded=rows, out=tmp_path / "a", centralised=True, **OWN_TEST)
    zero = fedvlm.run("zero-shot", embedded=rows, out=tmp_path / "b", **OWN_TEST)
    assert result.tables[0]["own"] != zero.tables[0]["own"]


def test_a_method_that_adapts_in_the_end_cannot_be_centralised(rows, tmp_path):
    with pytest.raises(SettingsError, match="adapts to every client in the end"):
        fedvlm.run("promptfl-ft", embedded=rows, out=tmp_path / "a", centralised=True, **OWN_TEST)


def test_faa_clip_runs_beside_a_test_set_of_all(rows, tmp_path):
    """Its reference rows are public, and the test rows of all are nobody's reference."""
    quick = {"name": "faa-clip", "rounds": 1}
    result = fedvlm.run(
        quick,
        embedded=rows,
        out=tmp_path / "a",
        global_test=True,
        clients={"public_ratio": 0.2},
        **OWN_TEST,
    )
    assert result.tables[0]["global"] is not None
