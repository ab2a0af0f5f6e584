"""A client that joins late adapts alone, and its classifier is saved like any other."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fedvlm
from fedvlm.classifier.card import Story, save
from fedvlm.classifier.join import join
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
def halves(rows_like):
    """Two domains that run, and a third that comes later."""
    rows = rows_like(rows=600)
    late = rows.domains == "sketch"
    return some(rows, np.flatnonzero(~late)), some(rows, np.flatnonzero(late))


def finished(tmp_path, rows, method):
    return fedvlm.run(
        method, embedded=rows, out=tmp_path / "run", protocol="own-test", allow_small=True
    )


def test_a_late_client_beats_an_unseen_one_on_its_own_rows(tmp_path, halves):
    there, late = halves
    run = finished(tmp_path, there, "tofa")
    before = run.outcome("all")[0]
    done = join(run, late, "sketch")
    assert done.adapted
    assert done.accuracy > done.unseen
    assert done.rows + done.held == len(late.labels)
    after = Result(run.folder).outcome("all")[0]
    assert all(torch.equal(before[key], after[key]) for key in before)  # nothing goes back
    done.classifier.save_pretrained(tmp_path / "mine")
    again = Personalised.from_pretrained(tmp_path / "mine")
    assert again.client == "sketch"
    assert torch.equal(again.logits(late.x), done.classifier.logits(late.x))


def test_it_may_have_some_of_the_classes_in_another_order(tmp_path, halves):
    there, late = halves
    run = finished(tmp_path, there, "tofa")
    few = some(late, np.flatnonzero(np.isin(late.labels, [1, 3])))
    turned = replace(few, classes=("dog", "bee"), labels=(few.labels == 1).astype(np.int64))
    named, numbered = join(run, turned), join(run, few)
    assert named.accuracy == numbered.accuracy
    assert named.classifier.frozen.classes == there.classes


def test_a_method_without_adaptation_gives_what_every_unseen_client_gets(tmp_path, halves):
    there, late = halves
    run = finished(tmp_path, there, {"name": "fedavg", "rounds": 2})
    done = join(run, late)
    assert not done.adapted
    assert done.accuracy == done.unseen


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encoder": "another@1"}, "encode the images with the run's encoder"),
        ({"classes": ("ant", "bee", "cat", "cow")}, "no class of the run is called 'cow'"),
    ],
)
def test_rows_that_do_not_fit_the_run_are_refused(tmp_path, halves, change, said):
    there, late = halves
    run = finished(tmp_path, there, "tofa")
    with pytest.raises(FedVLMError, match=said):
        join(run, replace(late, **change))


def test_the_share_is_between_none_and_all(tmp_path, halves):
    there, late = halves
    run = finished(tmp_path, there, "tofa")
    with pytest.raises(FedVLMError, match="share = 1"):
        join(run, late, share=1.0)


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
    said = CliRunner().invoke(app, ["join", run, str(tmp_path / "new"), "--out", out])
    assert said.exit_code == 0, said.output
    assert "new: 100.00 % of " in said.output
    assert Personalised.from_pretrained(out).client == "new"


def test_a_late_client_is_calibrated_and_has_a_card_like_an_exported_one(tmp_path, halves):
    there, late = halves
    run = finished(tmp_path, there, "tofa")
    done = join(run, late, "sketch")
    known = done.classifier.calibration
    assert (known.rows, len(known.scores)) == (26, 13)  # 39 of the 160 it learns from
    assert done.classifier.predict_set(late.x[:4], 0.9)
    save(done.classifier, Story(run.manifest, "all", done.held, 3), tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "26 validation rows" in card and "13 rows that nothing" in card and "0.92" in card
    again = Personalised.from_pretrained(tmp_path / "mine").calibration
    assert again.log_heat == known.log_heat and torch.equal(again.scores, known.scores)
