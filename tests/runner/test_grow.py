"""A run grows by classes and images: as if it had them from the start, and only if a change hides single images."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedvlm
from fedvlm.classifier.export import export
from fedvlm.cli import app
from fedvlm.errors import DataError, SettingsError
from fedvlm.record import Record
from fedvlm.runner.run import grow

CLASSES = ["ant", "bee", "cat"]
RIDGE = {"name": "ridge", "ridge": 1e-3}


def silent(stage, done, total):
    pass


def write_table(path, n_classes=2, n_samples=40, skip=0):
    """A table of three clients; `skip` samples of the first class of the first client are left out."""
    draw = np.random.default_rng(0)
    centres, x, y, clients = draw.normal(size=(3, 12)), [], [], []
    for client in "abc":
        for label in range(3):
            points = centres[label] + 0.3 * draw.normal(size=(60, 12))
            first = skip if (client, label) == ("a", 0) else 0
            if label < n_classes:
                x.append(points[first:n_samples])
                y += [label] * (n_samples - first)
                clients += [client] * (n_samples - first)
    np.savez(path, x=np.concatenate(x), y=np.array(y), clients=np.array(clients), classes=np.array(CLASSES[:n_classes]))
    return f"store:{path}"


def run(encoder, out, method=RIDGE, **settings):
    clients = {"partition": "own", "calibration_ratio": 0.0}
    return fedvlm.run(method, encoder=encoder, protocol="own-test", clients=clients, out=str(out), **settings)


@pytest.mark.parametrize("method", [RIDGE, "auto"], ids=["ridge", "auto"])
def test_a_grown_run_is_the_run_that_has_all_classes_from_the_start(tmp_path, method):
    run(write_table(tmp_path / "two.npz"), tmp_path / "one", method)
    grown = grow(tmp_path / "one", write_table(tmp_path / "three.npz", 3), tmp_path / "two", silent)
    start = run(f"store:{tmp_path / 'three.npz'}", tmp_path / "start", method)
    for key, value in start.outcome("all")[0].items():
        assert torch.equal(value, grown.outcome("all")[0][key])


def test_versions_are_on_the_card(tmp_path):
    run(write_table(tmp_path / "two.npz"), tmp_path / "one")
    done = CliRunner().invoke(
        app, ["grow", str(tmp_path / "one"), write_table(tmp_path / "three.npz", 3), "-o", str(tmp_path / "two")]
    )
    assert done.exit_code == 0 and "120 samples added, 0 removed, new classes: cat" in done.output
    fewer = write_table(tmp_path / "fewer.npz", 3, skip=20)
    grow(tmp_path / "two", fewer, tmp_path / "three", silent)
    assert [change["removed"] for change in Record(tmp_path / "three").manifest["history"]] == [0, 20]
    export(tmp_path / "three", "a", tmp_path / "classifier")
    card = (tmp_path / "classifier" / "README.md").read_text()
    assert "| version 2 | grown from `one`: 120 samples added, 0 removed, new classes cat |" in card
    assert "| version 3 | grown from `two`: 0 samples added, 20 removed |" in card


def test_a_change_that_shows_single_samples_is_refused_with_the_remedy(tmp_path):
    run(write_table(tmp_path / "two.npz"), tmp_path / "one")
    few = write_table(tmp_path / "few.npz", skip=1)
    with pytest.raises(DataError, match="1 samples of ant at a have changed.*wait until 16 .*channel.noise_multiplier"):
        grow(tmp_path / "one", few, tmp_path / "two", silent)
    assert not (tmp_path / "two").exists()
    grow(tmp_path / "one", write_table(tmp_path / "many.npz", n_samples=60), tmp_path / "two", silent)
    noise = {"clip": 1.0, "noise_multiplier": 1.0}
    run(
        f"store:{tmp_path / 'two.npz'}",
        tmp_path / "noisy",
        {"name": "fedavg", "rounds": 1, "head": "random"},
        channel=noise,
    )
    grow(tmp_path / "noisy", few, tmp_path / "noisy-2", silent)


def test_what_cannot_be_compared_is_refused(tmp_path):
    encoder = write_table(tmp_path / "two.npz")
    fedvlm.run(
        RIDGE, encoder=encoder, protocol="own-test", clients={"partition": "iid", "count": 3}, out=str(tmp_path / "iid")
    )
    with pytest.raises(SettingsError, match="cannot grow: its samples must be in files, and its clients named"):
        grow(tmp_path / "iid", encoder, tmp_path / "x", silent)
    run(encoder, tmp_path / "one")
    write_table(tmp_path / "two.npz", n_samples=30)
    with pytest.raises(DataError, match="are not as they were; keep them"):
        grow(tmp_path / "one", encoder, tmp_path / "x", silent)
