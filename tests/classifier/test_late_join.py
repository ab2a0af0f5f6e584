"""A client that joins late adapts alone, and its classifier is saved like any other."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fedvlm
from fedvlm.classifier.export import ClassifierOrigin, save_with_card
from fedvlm.classifier.late_join import join
from fedvlm.classifier.personalised import Personalised
from fedvlm.cli import app
from fedvlm.errors import FedVLMError
from fedvlm.result import Result


def some(rows, keep):
    return replace(
        rows,
        x=rows.x[keep],
        content=[rows.content[i] for i in keep],
        labels=rows.labels[keep],
        domains=rows.domains[keep],
        clients=rows.clients[keep],
        splits=rows.splits[keep],
    )


@pytest.fixture
def federation_and_joiner(rows_like):
    """Two domains that run, and a third that comes later."""
    rows = rows_like(rows=600)
    is_joiner = rows.domains == "sketch"
    return some(rows, np.flatnonzero(~is_joiner)), some(rows, np.flatnonzero(is_joiner))


def finished(tmp_path, rows, method):
    return fedvlm.run(method, embedded=rows, out=tmp_path / "run", protocol="own-test", allow_small=True)


def test_a_late_client_beats_an_unseen_one_on_its_own_rows(tmp_path, federation_and_joiner):
    federation, joiner = federation_and_joiner
    run = finished(tmp_path, federation, "tofa")
    before = run.outcome("all")[0]
    done = join(run, joiner, "sketch")
    assert done.is_adapted
    assert done.accuracy > done.unseen_accuracy
    assert done.n_train_samples + done.n_test_samples == len(joiner.labels)
    after = Result(run.folder).outcome("all")[0]
    assert all(torch.equal(before[key], after[key]) for key in before)  # nothing goes back
    done.classifier.save_pretrained(tmp_path / "mine")
    again = Personalised.from_pretrained(tmp_path / "mine")
    assert again.client == "sketch"
    assert torch.equal(again.logits(joiner.x), done.classifier.logits(joiner.x))


def test_it_may_have_some_of_the_classes_in_another_order(tmp_path, federation_and_joiner):
    federation, joiner = federation_and_joiner
    run = finished(tmp_path, federation, "tofa")
    two_classes = some(joiner, np.flatnonzero(np.isin(joiner.labels, [1, 3])))
    turned = replace(two_classes, classes=("dog", "bee"), labels=(two_classes.labels == 1).astype(np.int64))
    named, numbered = join(run, turned), join(run, two_classes)
    assert named.accuracy == numbered.accuracy
    assert named.classifier.frozen.classes == federation.classes


def test_a_method_without_adaptation_gives_what_every_unseen_client_gets(tmp_path, federation_and_joiner):
    federation, joiner = federation_and_joiner
    run = finished(tmp_path, federation, {"name": "fedavg", "rounds": 2})
    done = join(run, joiner)
    assert not done.is_adapted
    assert done.accuracy == done.unseen_accuracy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder": "another@1"}, "encode the images with the run's encoder"),
        ({"classes": ("ant", "bee", "cat", "cow")}, "no class of the run is called 'cow'"),
    ],
)
def test_rows_that_do_not_fit_the_run_are_refused(tmp_path, federation_and_joiner, change, message):
    federation, joiner = federation_and_joiner
    run = finished(tmp_path, federation, "tofa")
    with pytest.raises(FedVLMError, match=message):
        join(run, replace(joiner, **change))


def test_the_share_is_between_none_and_all(tmp_path, federation_and_joiner):
    federation, joiner = federation_and_joiner
    run = finished(tmp_path, federation, "tofa")
    with pytest.raises(FedVLMError, match="train_fraction must be above 0 and below 1, got 1"):
        join(run, joiner, train_fraction=1.0)


def test_the_command_writes_a_classifier_and_says_how_good_it_is(tmp_path):
    draw = np.random.default_rng(0)
    for place in ("old/north", "old/south", "new/west"):
        for name, shade in (("day", 200), ("night", 20)):
            folder = tmp_path / place / name
            folder.mkdir(parents=True)
            for i in range(12):
                pixels = (shade + draw.integers(0, 50, (16, 16, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    run, out = str(tmp_path / "run"), str(tmp_path / "mine")
    fedvlm.run("tofa", data=str(tmp_path / "old"), out=run, protocol="own-test", allow_small=True)
    output = CliRunner().invoke(app, ["join", run, str(tmp_path / "new"), "--output", out])
    assert output.exit_code == 0, output.output
    assert "new: 100.00 % accuracy on " in output.output
    assert Personalised.from_pretrained(out).client == "new"


def test_a_late_client_is_calibrated_and_has_a_card_like_an_exported_one(tmp_path, federation_and_joiner):
    federation, joiner = federation_and_joiner
    run = finished(tmp_path, federation, "tofa")
    done = join(run, joiner, "sketch")
    calibration = done.classifier.calibration
    assert (calibration.rows, len(calibration.scores)) == (26, 13)  # 39 of the 160 it learns from
    assert done.classifier.predict_set(joiner.x[:4], 0.9)
    save_with_card(done.classifier, ClassifierOrigin(run.manifest, "all", done.n_test_samples, 3), tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "26 validation samples" in card and "13 further samples" in card and "0.92" in card
    again = Personalised.from_pretrained(tmp_path / "mine").calibration
    assert again.log_temperature == calibration.log_temperature and torch.equal(again.scores, calibration.scores)
