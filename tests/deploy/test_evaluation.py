"""Classifiers are measured at all sites without training, as far as each site's rules allow."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedvlm.classifier.export import export
from fedvlm.cli import app
from fedvlm.deploy.kits import read_site, write_site
from fedvlm.deploy.operations.events import EventLog
from fedvlm.deploy.server.evaluation import (
    EvaluationEngine,
    evaluate_at_sites,
    evaluation_spec,
    evaluation_table,
    read_tested,
)
from fedvlm.deploy.site.consent import accept_request, format_request, refuse_request, waiting_requests
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.people import Person
from fedvlm.deploy.site.policy import example_policy
from fedvlm.deploy.site.service import Site
from fedvlm.deploy.site.training import PARTITION_SEED
from fedvlm.engines.flower.engine import local_grid
from fedvlm.errors import FederationError, SettingsError
from fedvlm.evaluate.statistics import wilson_interval
from fedvlm.runner.prepare import divide_client
from tests.deploy.conftest import CLASSES, NAMES, store

FEDAVG = {"name": "fedavg", "rounds": 2, "lr": 1e-2}
STATEMENT = {"purpose": "a test of evaluation", "contact": "tests@example.org"}


def evaluate(place, *classifiers, **words):
    request = {"evaluates": list(classifiers), **STATEMENT, **words}
    return evaluate_at_sites(local_grid(place.desks), place.kit, request, EventLog(place.kit.folder))


def ran(place, verified=False, out="kits/server/runs/one"):
    channel = {"verified": True, "clip": 1.0} if verified else {}
    return place.run(place.settings(FEDAVG, channel=channel), out)


def set_policy(place, name, plain=False, **rules):
    text = example_policy(("fedavg",), plain)
    for key, value in rules.items():
        [line] = [line for line in text.splitlines() if line.startswith(f"{key} = ")]
        text = text.replace(line, f"{key} = {json.dumps(value)}")
    (place.site(name) / "policy.toml").write_text(text)


def test_sites_count_what_the_run_itself_counted(place):
    result = ran(place)
    done = evaluate(place, "one", "zero-shot")
    final = result.trainings()["all"]["scores"]
    for name in NAMES:
        shared, zero_shot = done["sites"][name]["scores"]
        # fedavg has no local tensors: the shared classifier is each client's own
        assert (shared["test_rows"], shared["test_hits"]) == (final[name]["test_rows"], final[name]["test_hits"])
        rows = torch.from_numpy(place.desks[name].handler.trainings.popitem()[1].world.members[name].test)
        assert zero_shot["test_rows"] == shared["test_rows"] == len(rows)
    head, body = evaluation_table(done)
    assert head == ["classifier", "all", *NAMES] and [row[0] for row in body] == ["one", "zero-shot"]


def test_an_export_is_measured_with_its_own_tensors(place, tmp_path):
    settings = place.settings({"name": "fedot", "rounds": 2, "lr": 1e-2})
    alone = place.alone(settings)
    classifier = export(alone.folder, "photo", tmp_path / "export")
    done = evaluate(place, str(tmp_path / "export"))
    for name in NAMES:
        keep = place.rows.domains == name
        site = place.desks[name].kit
        test = alone_test(place, name)
        hits = sum(
            p == place.rows.classes[y]
            for p, y in zip(classifier.predict(place.rows.x[test]), place.rows.labels[test], strict=True)
        )
        assert done["sites"][name]["scores"][0]["test_hits"] == hits and keep[test].all() and site.name == name


def alone_test(place, name, rows=None):
    """The test samples of a site, or of some of its samples, in the table of all sites."""
    own = np.flatnonzero(place.rows.domains == name) if rows is None else rows
    clients = place.settings().clients
    return own[divide_client(clients, place.rows.select(own), name, PARTITION_SEED).clients[name].test].tolist()


def test_a_site_with_test_data_only_measures_all_of_them_and_trains_nothing(place):
    ran(place)
    write_site(replace(read_site(place.site("art")), test_only=True))
    place.desks["art"] = Site(read_site(place.site("art")))
    done = evaluate(place, "one")
    assert done["sites"]["art"]["scores"][0]["test_rows"] == int((place.rows.domains == "art").sum())
    place.rules(quorum=1.0)
    with pytest.raises(FederationError, match="art: .*its data are for tests only"):
        place.run(place.settings({**FEDAVG, "lr": 5e-3}), "two")
    store(
        place.folder / "marked.npz",
        place.rows,
        place.rows.domains == "photo",
        split=np.full(int((place.rows.domains == "photo").sum()), "test"),
    )
    place.set_data("photo", place.folder / "marked.npz")
    place.desks["photo"] = Site(read_site(place.site("photo")))
    done = evaluate(place, "one")
    assert done["sites"]["photo"]["scores"][0]["test_rows"] == int((place.rows.domains == "photo").sum())


def test_images_that_a_site_trained_on_are_not_tested_after_its_data_change(place):
    ran(place)
    own = np.flatnonzero(place.rows.domains == "art")
    learned = {place.rows.content[row] for row in own.tolist()} - contents(place, alone_test(place, "art"))
    kept = own[: len(own) * 3 // 4]
    place.change("art", np.isin(np.arange(len(place.rows.labels)), kept))
    now = contents(place, alone_test(place, "art", kept))
    assert now & learned  # the samples are divided anew
    assert evaluate(place, "one")["sites"]["art"]["scores"][0]["test_rows"] == len(now - learned) > 0
    place.change(
        "art", np.isin(np.arange(len(place.rows.labels)), own[[place.rows.content[row] in learned for row in own]][:20])
    )
    assert "no test samples that none of its trainings has used" in evaluate(place, "one")["missing"]["art"]


def contents(place, rows):
    return {place.rows.content[row] for row in rows}


def test_each_site_reports_as_its_scores_rule_allows(place):
    ran(place)
    set_policy(place, "art", plain=True, scores="none")
    set_policy(place, "photo", plain=True, scores="coarse")
    done = evaluate(place, "one")
    assert done["sites"]["art"]["units"] == 0 and set(done["sites"]["art"]["scores"][0].values()) == {0}
    photo = done["sites"]["photo"]["scores"][0]
    assert photo["test_hits"] in [round(step / 20 * photo["test_rows"]) for step in range(21)]
    assert all(round(20 * photo[key], 9) % 1 == 0 for key in ("AUC", "ECE"))
    [row] = evaluation_table(done)[1]
    assert row[2] == "not reported" and row[1] != "not reported"


def test_the_policy_limits_methods_samples_and_the_number_of_measurements(place):
    ran(place)
    set_policy(place, "art", plain=True, methods=["tofa"])
    set_policy(place, "photo", plain=True, methods=["zero-shot"])
    set_policy(place, "sketch", plain=True, measures=3)
    done = evaluate(place, "one")
    assert "the method is not allowed here" in done["missing"]["art"]
    assert list(evaluate(place, "one", "zero-shot")["sites"]) == ["sketch"]
    with pytest.raises(FederationError, match="all 3 measurements"):
        evaluate(place, "one")
    lines = Ledger(place.site("sketch")).read().lines
    assert [line["count"] for line in lines if line["kind"] == "evaluate" and "count" in line] == [1, 2]


def test_verified_rules_take_a_classifier_that_peers_have_signed_and_no_other(place):
    ran(place, verified=True)
    for name in NAMES:
        set_policy(place, name)
    done = evaluate(place, "one")
    assert sorted(done["sites"]) == NAMES and done["classifiers"][0]["signed"]
    assert all(round(20 * site["scores"][0]["ECE"], 9) % 1 == 0 for site in done["sites"].values())
    with pytest.raises(FederationError, match="have not approved this classifier"):
        evaluate(place, "one", "zero-shot")
    (place.site("art") / "peers.toml").write_text("")
    done = evaluate(place, "one")
    assert sorted(done["sites"]) == ["photo", "sketch"] and "have not approved" in done["missing"]["art"]


def test_a_server_cannot_pass_off_a_head_of_its_own_as_signed(place):
    ran(place, verified=True)
    ran(place, verified=True, out="kits/server/runs/two")
    for name in NAMES:
        set_policy(place, name)
    one, two = (read_tested(place.kit, name) for name in ("one", "two"))
    for lie in (
        {"tensors": {**one.tensors, "shared/head": one.tensors["shared/head"] + 1e-6}},
        {"tensors": {**one.tensors, "local/head": one.tensors["shared/head"]}},
        {"method": {**one.method, "lr": 1.0}},
        {"proof": {**one.proof, "agreements": two.proof["agreements"]}},
        {"proof": {**one.proof, "ends": two.proof["ends"]}},
        {"proof": {"plan": one.proof["plan"]}},
        {"proof": {}},
        {"classes": one.classes[::-1]},
    ):
        made = replace(one, **lie)
        spec = evaluation_spec([made], (), STATEMENT)
        engine = EvaluationEngine(local_grid(place.desks), place.kit, spec, [made], EventLog(place.kit.folder))
        with pytest.raises(FederationError, match="no site has measured"):
            engine.wait_for_sites()
        assert not engine.replies
    for name in NAMES:
        lines = [line for line in Ledger(place.site(name)).read().lines if line["kind"] == "evaluate"]
        assert lines and not any("costs" in line for line in lines)


def test_people_approve_the_hash_of_a_classifier_and_no_other_one(place, tmp_path):
    export(place.alone(place.settings(FEDAVG)).folder, "photo", tmp_path / "given")
    for name in NAMES:
        set_policy(place, name)
    with pytest.raises(FederationError, match="have not approved this classifier"):
        evaluate(place, str(tmp_path / "given"))
    folder = place.site("art")
    [request] = waiting_requests(folder)
    texts = dict(format_request(folder, request))
    hash_of = read_tested(place.kit, str(tmp_path / "given")).entry["tensors"][:16]
    assert (
        hash_of in texts["Method"] and texts["From"] == "the test samples" and "No image leaves" in texts["What leaves"]
    )
    accept_request(folder, Person("A. Person", "approver"), request.plan, 1.0)
    refuse_request(place.site("photo"), Person("B. Person", "operator"), request.plan, "no")
    done = evaluate(place, str(tmp_path / "given"))
    assert list(done["sites"]) == ["art"] and done["plan"] == request.plan
    assert "a person at this site has refused" in done["missing"]["photo"]
    with pytest.raises(FederationError, match="have not approved this classifier"):
        evaluate(place, "zero-shot", classes=CLASSES)


def test_consent_is_asked_for_whatever_is_signed(place):
    ran(place, verified=True)
    place.asks_for_consent("art")
    done = evaluate(place, "one")
    assert "nobody at this site has consented" in done["missing"]["art"]
    place.consents("art")
    assert "art" in evaluate(place, "one")["sites"]
    assert "names no purpose" not in str(
        evaluate(place, "one", purpose="", contact="")["missing"]
    )  # the run names both
    assert "names no purpose" in evaluate(place, "zero-shot", classes=CLASSES, purpose="")["missing"]["art"]


def test_another_encoder_is_refused(place):
    ran(place)
    place.change("art", encoder=np.array("toy@1"))
    assert "not those of the classifier" in evaluate(place, "one")["missing"]["art"]
    assert "different encoders" in evaluate(place, "zero-shot", classes=CLASSES)["notes"][0]


def test_wrong_words_are_refused_with_the_remedy(place, tmp_path):
    ran(place)
    for names, classes, error in (
        (["zero-shot"], (), "zero-shot needs class names; give --classes"),
        (["one"], ("cat", "dog"), "--classes has the classes cat, dog, and one has ant"),
        (["none"], (), "none is no run and no exported classifier"),
        ([], (), "name 1 to 16 classifiers, got 0"),
    ):
        with pytest.raises(SettingsError, match=error):
            evaluation_spec([read_tested(place.kit, name) for name in names], classes, {})
    folder = place.alone(place.settings({"name": "alone"})).folder
    with pytest.raises(SettingsError, match="alone shares nothing"):
        read_tested(place.kit, str(folder))
    done = CliRunner().invoke(app, ["deploy", "evaluate", str(place.kit.folder), "one"])
    assert done.exit_code and "no server answers" in str(done.exception or done.output)


def test_the_interval_is_that_of_wilson():
    from scipy.stats import binomtest

    for hits, n in ((0, 5), (3, 10), (40, 40)):
        expected = binomtest(hits, n).proportion_ci(0.95, "wilson")
        assert wilson_interval(hits / n, n) == pytest.approx((expected.low, expected.high), abs=1e-4)
