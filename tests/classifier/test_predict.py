"""A saved classifier asked by the command line: ranks, sets, decisions and scores."""

import csv
import io
import json
from dataclasses import replace
from shutil import copy

import numpy as np
import pytest
from PIL import Image

from fedvlm.classifier.export import export
from fedvlm.classifier.personalised import Personalised
from fedvlm.classifier.predict import predict, score
from fedvlm.errors import DataError
from tests.helpers.classifiers import export_classifier


def test_predict_tells_ranks_sets_and_decisions_in_both_forms(runs, folder, tmp_path, call):
    export(runs("zero-shot").folder, "site-0", tmp_path / "c")
    images = folder / "site-0" / "red"
    done = call("predict", tmp_path / "c", images, "--all")
    head, *lines = list(csv.reader(done.stdout.splitlines()))
    assert head == ["file", "rank", "class", "probability"] and len(lines) == 40
    assert [line[1] for line in lines[:2]] == ["1", "2"]
    assert float(lines[0][3]) + float(lines[1][3]) == pytest.approx(1, abs=2e-4)
    assert "calibrated on only 6 validation samples" in done.stderr
    output = json.loads(call("predict", tmp_path / "c", images, "--coverage", "0.5", "--json").stdout)
    assert {tuple(prediction) for prediction in output["predictions"]} == {
        ("file", "class", "probability", "set", "decision")
    }
    for prediction in output["predictions"]:
        assert prediction["decision"] == (prediction["set"][0] if len(prediction["set"]) == 1 else "")
    with pytest.raises(DataError, match="needs 19 calibration samples, got 2"):
        call("predict", tmp_path / "c", images, "--coverage", "0.95")


def test_a_probability_that_nothing_calibrated_is_called_so(runs, folder, tmp_path, call):
    classifier = runs("zero-shot").personalised("site-0")
    replace(classifier, calibration=None).save_pretrained(tmp_path / "c")
    done = call("predict", tmp_path / "c", folder / "site-0" / "red")
    assert done.stdout.splitlines()[0] == "file,class,uncalibrated probability"
    assert "not calibrated" in done.stderr


def test_score_measures_labelled_images(runs, folder, tmp_path, call):
    export(runs("tofa").folder, "site-0", tmp_path / "c")
    output = json.loads(call("score", tmp_path / "c", folder / "site-1", "--json", "--coverage", "0.5").stdout)
    predictions = predict(tmp_path / "c", [folder / "site-1"], coverage=0.5).rows
    right = [prediction.label == prediction.file.split("/")[-2] for prediction in predictions]
    inside = [prediction.file.split("/")[-2] in prediction.prediction_set for prediction in predictions]
    assert output["rows"] == 40 and output["metrics"]["accuracy"] == pytest.approx(np.mean(right))
    assert output["coverage"] == pytest.approx(np.mean(inside))
    assert output["size"] == pytest.approx(np.mean([len(prediction.prediction_set) for prediction in predictions]))
    assert set(output["recall"]) == {"red", "blue"}
    assert any("training images" in note for note in output["notes"])  # which it cannot recognise
    text = call("score", tmp_path / "c", folder / "site-1", "--coverage", "0.5").stdout
    assert "coverage (target 50 %)" in text and "mean set size" in text
    (tmp_path / "odd" / "green").mkdir(parents=True)
    copy(next((folder / "site-0" / "red").iterdir()), tmp_path / "odd" / "green" / "a.png")
    with pytest.raises(DataError, match="class 'green'"):
        score(tmp_path / "c", str(tmp_path / "odd"))


def test_strange_images_are_marked_and_get_no_decision(tmp_path, call):
    folder, images = export_classifier(tmp_path)
    stranger = tmp_path / "stranger.png"
    grid = np.indices((16, 16)).sum(0) % 2 * 255
    Image.fromarray(np.stack([grid, grid, 255 - grid], axis=-1).astype(np.uint8)).save(stranger)
    done = call("predict", folder, images / "site-0", stranger, "--reject", "--coverage", "0.9")
    lines = list(csv.DictReader(io.StringIO(done.stdout)))
    marked = [line["rejected"] for line in lines]
    assert set(marked[:-1]) == {"yes", "no"} and marked[:-1].count("yes") < 0.15 * len(marked)
    assert lines[-1]["file"] == str(stranger) and marked[-1] == "yes"
    assert all(line["decision"] == "" for line in lines if line["rejected"] == "yes")


def test_a_classifier_without_held_out_samples_refuses_to_reject(tmp_path):
    folder, images = export_classifier(tmp_path)
    classifier = replace(Personalised.from_pretrained(folder), novelty=None)
    classifier.save_pretrained(folder)
    with pytest.raises(DataError, match="has no held-out samples of its client"):
        predict(folder, [images], reject=True)
