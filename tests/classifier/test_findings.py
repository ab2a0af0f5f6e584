"""Classifiers of several findings per image: prediction, scores, service, ONNX, groups and late clients."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedvlm
from fedvlm.classifier.export import export
from fedvlm.classifier.late_join import join
from fedvlm.classifier.predict import predict, score
from fedvlm.encoders.store import open_store
from fedvlm.errors import DataError, SettingsError
from fedvlm.evaluate.findings import average_precision, roc_area
from fedvlm.serving import ClassifierService, render_page

NAMES = ["edema", "effusion", "mass"]


def write_table(path, seed=0, samples=600, images=3, names=NAMES, offset=0):
    """Write a table of embeddings of patients with several images each; some labels are unknown."""
    generator = np.random.default_rng(seed)
    weights = np.random.default_rng(7).normal(size=(len(NAMES), 8)) * 2
    patients = np.repeat(np.arange(samples // images), images)
    x = generator.normal(size=(samples // images, 8))[patients] + 0.5 * generator.normal(size=(samples, 8))
    p = 1 / (1 + np.exp(-2 * x @ weights.T))
    y = (p > generator.random((samples // images, len(NAMES)))[patients]).astype(float)
    y[generator.random(y.shape) < 0.1] = np.nan
    places = [NAMES.index(name) for name in names]
    groups = np.array([f"patient {offset + number}" for number in patients])
    np.savez(path, x=x, y=y[:, places], classes=names, clients=np.array(["a", "b"])[patients % 2], groups=groups)
    return x, y[:, places]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("findings")
    write_table(place / "train.npz", samples=1800)
    settings = {"protocol": "own-test", "clients": {"partition": "own", "calibration_ratio": 0.33}, "allow_small": True}
    fedvlm.run("ridge", encoder=f"store:{place / 'train.npz'}", out=place / "run", **settings)
    export(place / "run", "a", place / "classifier", onnx=True)
    write_table(place / "new.npz", seed=1, offset=10_000)
    return place


def test_command_prints_findings_and_the_probability_of_each(place, call):
    lines = list(csv.DictReader(call("predict", place / "classifier", place / "new.npz").stdout.splitlines()))
    assert len(lines) == 600 and list(lines[0]) == ["file", "findings", *NAMES]
    for line in lines:
        present = [name for name in NAMES if float(line[name]) >= 0.5]
        assert line["findings"] == ("|".join(present) or "no finding")


def test_a_decision_leaves_no_finding_in_doubt(place):
    rows = predict(place / "classifier", [place / "new.npz"], coverage=0.97).rows
    assert {bool(row.decision) for row in rows} == {True, False}
    for row in rows:
        in_doubt = any(name.endswith("?") for name in row.prediction_set)
        assert row.decision == ("" if in_doubt else "|".join(row.prediction_set) or "no finding")


@pytest.mark.parametrize("rule", ["mean", "max"])
def test_prediction_of_a_group_is_that_of_its_pooled_logits(place, rule):
    classifier = fedvlm.Personalised.from_pretrained(place / "classifier")
    x = np.load(place / "new.npz")["x"]
    logits = classifier.logits(x).reshape(200, 3, len(NAMES))
    pooled = logits.mean(1) if rule == "mean" else logits.amax(1)
    expected = classifier.log_probabilities(pooled).exp().numpy()
    rows = predict(place / "classifier", [place / "new.npz"], group=rule).rows
    assert [row.file for row in rows] == [f"patient {10_000 + number}" for number in range(200)]
    for row, chances in zip(rows, expected, strict=True):
        assert [dict(row.probabilities)[name] for name in NAMES] == pytest.approx(chances, abs=1e-5)


def test_groups_have_no_sets_of_images_and_need_a_column(place, tmp_path):
    with pytest.raises(SettingsError, match="calibrated by image"):
        predict(place / "classifier", [place / "new.npz"], group="mean", coverage=0.8)
    np.savez(tmp_path / "bare.npz", x=np.ones((2, 8)))
    with pytest.raises(DataError, match="no column group"):
        predict(place / "classifier", [tmp_path / "bare.npz"], group="max")


def test_scores_are_those_of_the_predictions(place):
    done = score(place / "classifier", f"store:{place / 'new.npz'}", coverage=0.97)
    table = open_store(place / "new.npz")
    y = torch.from_numpy(table.findings[table.labels])
    p = torch.from_numpy(fedvlm.Personalised.from_pretrained(place / "classifier").predict_proba(table.x)).double()
    for number, name in enumerate(NAMES):
        known = y[:, number] >= 0
        pair = p[known, number], y[known, number] == 1
        assert done.findings[name]["AUC"] == pytest.approx(roc_area(*pair), abs=1e-4)
        assert done.findings[name]["AP"] == pytest.approx(average_precision(*pair), abs=1e-4)
    assert done.metrics["AUC"] == pytest.approx(np.mean([done.findings[name]["AUC"] for name in NAMES]))
    assert done.rows == 600 and 0.94 < done.coverage < 1 and 0 < done.decided < 1
    by_group = score(place / "classifier", f"store:{place / 'new.npz'}", group="mean")
    assert by_group.rows == 200


def test_findings_that_data_lack_are_unknown_and_strange_ones_are_refused(place, tmp_path, call):
    write_table(tmp_path / "two.npz", seed=1, names=["mass", "edema"])
    output = json.loads(call("score", place / "classifier", f"store:{tmp_path / 'two.npz'}", "--json").stdout)
    full = score(place / "classifier", f"store:{place / 'new.npz'}")
    assert output["findings"]["effusion"]["known"] == 0
    assert output["findings"]["mass"]["AUC"] == pytest.approx(full.findings["mass"]["AUC"])
    table = dict(np.load(tmp_path / "two.npz")) | {"classes": ["mass", "fracture"]}
    np.savez(tmp_path / "strange.npz", **table)
    with pytest.raises(DataError, match="'fracture'"):
        score(place / "classifier", f"store:{tmp_path / 'strange.npz'}")
    np.savez(tmp_path / "single.npz", x=table["x"], y=np.zeros(600, np.int64), classes=["mass"])
    with pytest.raises(DataError, match="one class per image, and several findings"):
        score(place / "classifier", f"store:{tmp_path / 'single.npz'}")


def test_service_answers_with_findings_and_counts_each(place):
    classifier = fedvlm.Personalised.from_pretrained(place / "classifier")
    service = ClassifierService(classifier, None)
    x = np.load(place / "new.npz")["x"][:20]
    answers = service.predict_batch({"embeddings": x.tolist()})[0]["predictions"]
    assert [answer["class"] for answer in answers] == classifier.predict(x)
    for answer in answers:
        assert answer["class"] == ("|".join(answer["findings"]) or "no finding")
    accepted = [answer for answer in answers if not answer["rejected"]]
    assert service.predicted["mass"] == sum("mass" in answer["findings"] for answer in accepted) > 0
    assert "3 findings: edema, effusion, mass" in render_page(service.info())[0]


def test_onnx_gives_the_calibrated_probability_of_each_finding(place):
    import onnxruntime

    session = onnxruntime.InferenceSession(place / "classifier" / "classifier.onnx")
    x = np.load(place / "new.npz")["x"].astype(np.float32)
    (p,) = session.run(["probabilities"], {"embeddings": x})
    classifier = fedvlm.Personalised.from_pretrained(place / "classifier")
    assert np.allclose(p, classifier.predict_proba(x), atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["multi_label"] == "true"
    temperatures = [fit.log_temperature for fit in classifier.calibration.findings]
    assert len({round(value, 6) for value in temperatures}) == len(NAMES)  # each finding has its own
    assert "over 3 findings" in (place / "classifier" / "README.md").read_text()


@pytest.mark.parametrize("method", ["ridge", "auto", "alone"])
def test_a_late_client_joins_with_some_of_the_findings(place, tmp_path, method):
    settings = {"protocol": "own-test", "clients": {"partition": "own"}, "allow_small": True}
    result = fedvlm.run(method, encoder=f"store:{place / 'train.npz'}", out=tmp_path / "run", **settings)
    write_table(tmp_path / "late.npz", seed=2, names=["mass", "edema"])
    rows = open_store(tmp_path / "late.npz")
    done = join(result, replace(rows, encoder=result.manifest["encoder"]), "late")
    assert done.classifier.frozen.classes == tuple(NAMES) and done.accuracy > 0.6
    x, y = rows.x.numpy(), rows.findings[rows.labels]
    p = done.classifier.predict_proba(x)
    assert np.mean((p[:, 2] >= 0.5) == y[:, 0]) > 0.6 and np.mean((p[:, 0] >= 0.5) == y[:, 1]) > 0.6
