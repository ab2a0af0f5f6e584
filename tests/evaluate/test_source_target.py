"""The source/target protocol, the reference set, and rows that are nobody's."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import fedvlm
from fedvlm import cli
from fedvlm.core import make
from fedvlm.data.clients import Clients
from fedvlm.data.partition import make_partition
from fedvlm.errors import DataError, SettingsError
from fedvlm.evaluate import protocols
from fedvlm.evaluate.metrics import METRICS, THRESHOLDS
from fedvlm.evaluate.protocols import contract
from fedvlm.report.plots import draw_diagrams
from fedvlm.report.runs import run_label
from fedvlm.report.tables import compare_table

QUICK = {"name": "faa-clip", "rounds": 2}
PLAIN = {"protocol": "source-target", "target": "sketch"}


def test_a_run_has_every_metric_over_clients_and_on_the_target(rows, tmp_path):
    result = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", **PLAIN)
    table = result.tables[0]
    for name in METRICS:
        assert 0 <= table[f"target {name}"] <= 1
        per_client = [table[f"{name} {id}"] for id in ("art", "photo")]
        assert table[f"clients {name}"] == pytest.approx(np.mean(per_client))
    three = [table[f"accuracy {id}"] for id in ("art", "photo", "sketch")]
    assert table["average"] == pytest.approx(np.mean(three))
    assert "target AUC" in result.table() and "AUC art" not in result.table()


def test_the_record_has_curves_over_the_rounds_and_diagrams_at_the_end(rows, tmp_path):
    result = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", **PLAIN)
    for line in result.rounds:
        assert {"target F1", "clients ECE", "target net benefit"} <= set(line)
        assert "AUC" in line["clients"]["art"]
    scores = result.trainings()["sketch"]["scores"]["sketch"]
    assert sum(row for row, _, _ in scores["reliability"]) == scores["test_rows"]
    assert [at for at, _ in scores["decision"]] == list(THRESHOLDS)


def test_every_protocol_keeps_the_metrics_of_the_end_and_no_curves_of_them(rows, tmp_path):
    result = fedvlm.run("zero-shot", embedded=rows, out=tmp_path / "a")
    assert set(METRICS[1:]) <= set(result.trainings()["art"]["scores"]["art"])
    quick = fedvlm.run({"name": "fedavg", "rounds": 1}, embedded=rows, out=tmp_path / "b")
    assert "F1" not in quick.rounds[0]["clients"]["art"]


def test_a_method_that_shares_nothing_has_no_target(rows, tmp_path):
    alone = {"name": "fedot-all-local", "rounds": 1}
    table = fedvlm.run(alone, embedded=rows, out=tmp_path / "a", **PLAIN).tables[0]
    assert table["target accuracy"] is None
    assert table["average"] is None
    assert table["clients accuracy"] > 0


def test_every_source_domain_is_dealt_to_clients_and_the_target_stays_whole(rows):
    """Multi-OF: Dirichlet clients in every source domain, one unseen domain."""
    clients = Clients("domain-dirichlet", count=3, alpha=5.0, min_samples=2)
    partition = make_partition(rows, clients, 0, ["sketch"])
    members, domains = partition.clients, partition.domains
    assert list(members) == [*(f"{d}-{i}" for d in ("art", "photo") for i in range(3)), "sketch"]
    (training,) = protocols.make_protocol("source-target", target=("sketch",)).trainings(domains, 0)
    assert training.unseen == ("sketch",)
    assert len(training.train) == 6


@pytest.mark.parametrize("by", ["dirichlet", "pathological"])
def test_one_domain_is_dealt_to_clients_and_others_are_tested_on(rows, by):
    clients = Clients(by, count=2, alpha=5.0, min_samples=2, domains="art")
    partition = make_partition(rows, clients, 0, ["photo", "sketch"])
    assert list(partition.clients) == ["client-0", "client-1", "photo", "sketch"]
    for id in ("client-0", "client-1"):
        assert partition.clients[id].domain == "art"
    (training,) = protocols.make_protocol(
        "source-target",
        target=(
            "photo",
            "sketch",
        ),
    ).trainings(partition.domains, 0)
    assert training.unseen == ("photo", "sketch")
    one_target = make_partition(rows, clients, 0, ["photo"])
    assert list(one_target.clients) == ["client-0", "client-1", "photo"]  # sketch is left out
    for id in ("client-0", "client-1"):
        assert np.array_equal(one_target.clients[id].train, partition.clients[id].train)


def test_a_split_with_whole_domains_leaves_the_others_as_they_are(rows):
    plain = make_partition(rows, Clients(), 0).clients
    for id, client in make_partition(rows, Clients(), 0, ["art"]).clients.items():
        assert np.array_equal(client.train, plain[id].train)
        assert np.array_equal(client.test, plain[id].test)


def test_rows_set_aside_are_nobodys_and_of_every_pool(rows):
    partition = make_partition(rows, Clients(public_ratio=0.25), 0)
    assert len(partition.public) == 60
    assigned = np.concatenate(
        [part for client in partition.clients.values() for part in (client.train, client.validation, client.test)]
    )
    assert not set(assigned.tolist()) & set(partition.public.tolist())
    assert len(assigned) + 60 == len(rows.labels)
    assert set(rows.domains[partition.public]) == {"art", "photo", "sketch"}
    assert not len(make_partition(rows, Clients(), 0).public)


def test_a_row_set_aside_that_repeats_a_dealt_picture_is_dropped(rows):
    twice = replace(rows, content=[f"{i // 2}" for i in range(len(rows.labels))])
    partition = make_partition(twice, Clients(public_ratio=0.5), 0)
    test_content = {twice.content[i] for client in partition.clients.values() for i in client.test}
    assert not test_content & {twice.content[i] for i in partition.public}


def test_the_public_reference_is_what_nobody_is_tested_on(rows):
    partition = make_partition(rows, Clients(public_ratio=0.1), 0)
    (training,) = protocols.make_protocol("source-target", target=("art",)).trainings(partition.domains, 0)
    public = contract.reference_samples(make("faa-clip"), partition, training)
    art = partition.clients["art"]
    expected = {*art.train.tolist(), *art.validation.tolist(), *partition.public.tolist()}
    assert set(public.tolist()) == expected
    target = contract.reference_samples(make("faa-clip", reference="target"), partition, training)
    assert set(target.tolist()) == set(art.test.tolist())
    assert not len(contract.reference_samples(make("faa-clip", adaptation=False), partition, training))
    assert not len(contract.reference_samples(make("fedot"), partition, training))


def test_a_reference_row_that_is_tested_on_is_refused_by_number():
    content = ["a", "b", "c", "b"]
    contract.check_disjoint(content, np.array([0, 1]), np.array([2]))
    with pytest.raises(DataError, match="row 1 of the reference set is .* the test row 3"):
        contract.check_disjoint(content, np.array([0, 1]), np.array([2, 3]))


def test_a_method_without_a_reference_set_is_refused_before_any_work(rows, tmp_path):
    with pytest.raises(SettingsError, match="set clients.public_ratio"):
        fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", protocol="own-test")
    assert not (tmp_path / "a" / "manifest.json").exists()
    options = {"embedded": rows, "protocol": "own-test"}
    for number, change in enumerate([{"clients": {"public_ratio": 0.1}}, {"method": {**QUICK, "adaptation": False}}]):
        fedvlm.run(**{"method": QUICK, **options, **change}, out=tmp_path / f"{number}")


def test_a_client_with_one_training_row_is_refused_by_name(rows, tmp_path):
    splits = np.full(240, "validation")
    splits[::2] = "test"
    splits[[0, 1, 2, 3, 5]] = "train"  # four rows of art, one of photo
    splits[8:12] = "train"  # sketch
    marked = replace(rows, splits=splits)
    with pytest.raises(DataError, match="client photo has 1 training samples, but faa-clip needs"):
        fedvlm.run(QUICK, embedded=marked, out=tmp_path / "a", **PLAIN)
    fedvlm.run({"name": "fedavg", "rounds": 1}, embedded=marked, out=tmp_path / "b", **PLAIN)


def test_a_transductive_run_says_so_in_every_table(rows, tmp_path):
    settings = {**QUICK, "reference": "target", "betas": [0.9, 0.98]}
    result = fedvlm.run(settings, embedded=rows, out=tmp_path / "a", **PLAIN)
    assert run_label(result) == "faa-clip (rounds=2, TRANSDUCTIVE: adapts to the test samples)"
    for form in ("text", "markdown", "latex", "csv"):
        assert "TRANSDUCTIVE" in compare_table([result], form)


def test_a_saved_classifier_gives_the_rows_their_logits_again(rows, tmp_path):
    result = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", **PLAIN)
    classifier = result.personalised("art")
    classifier.save_pretrained(tmp_path / "b")
    again = fedvlm.Personalised.from_pretrained(tmp_path / "b")
    assert again.method == make(**QUICK)
    assert (classifier.logits(rows.x) == again.logits(rows.x)).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protocol": "source-target"}, "leaves 3 clients to train and 0 unseen"),
        ({"protocol": "source-target", "target": ["art", "photo", "sketch"]}, "leaves 0 clients"),
        ({"protocol": "source-target", "target": "scetch"}, "did you mean 'sketch'"),
        ({"protocol": "source-target", "target": 3}, "target must be .*, got 3"),
        ({"target": "art"}, "is for protocol = 'source-target'"),
        ({"clients": {"domains": ["artt"]}}, "did you mean 'art'"),
        ({"clients": {"public_ratio": 1.0}}, "must be at least 0 and below 1, got 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(rows, tmp_path, settings, message):
    with pytest.raises(SettingsError, match=message):
        fedvlm.run("zero-shot", embedded=rows, out=tmp_path / "a", **settings)


def test_a_run_is_drawn_and_an_unknown_job_is_refused(rows, tmp_path):
    result = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", **PLAIN)
    path = draw_diagrams(result, tmp_path / "one.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    zero = fedvlm.run("zero-shot", embedded=rows, out=tmp_path / "b", protocol="own-test")
    assert draw_diagrams(zero, tmp_path / "two.png").stat().st_size > 10_000
    output = CliRunner().invoke(cli.app, ["plot", str(tmp_path / "a")], catch_exceptions=False)
    assert f"image: {tmp_path / 'a' / 'diagrams.png'}" in output.output
    with pytest.raises(SettingsError, match="did you mean 'sketch'"):
        draw_diagrams(result, tmp_path / "three.png", training="sketsh")
