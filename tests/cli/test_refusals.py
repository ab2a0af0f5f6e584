"""What a person gets wrong is told in a line, never as a traceback."""

import errno
import sys

import numpy as np
import pytest

from fedvlm import cli
from fedvlm.errors import FedVLMError


@pytest.fixture
def images(tmp_path):
    """Two classes at one site, as files that are listed and never decoded."""
    for name in ("cat", "dog"):
        folder = tmp_path / "images" / "north" / name
        folder.mkdir(parents=True)
        for number in range(10):
            (folder / f"{number}.png").write_text(f"{name} {number}")
    return tmp_path / "images"


def test_a_disk_that_refuses_is_told_in_a_line_with_its_path(refused, images, monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", "/media/stick/runs")

    monkeypatch.setattr("fedvlm.data.partition.count_table", read_only)
    text = refused("partition", images)
    assert text == "fedvlm: /media/stick/runs: Read-only file system; choose another path\n"


def test_an_operating_system_error_without_a_path_is_told_too(refused, images, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedvlm.data.partition.count_table", full)
    assert refused("partition", images) == "fedvlm: No space left on device; choose another path\n"


@pytest.mark.parametrize("words", ["predict c x.png", "report r", "plot r", "explain r"])
def test_a_folder_is_no_place_for_a_file(refused, tmp_path, words):
    text = refused(*words.split(), "--output", tmp_path)
    assert "--output" in text and "is a directory" in text


def test_a_folder_mistyped_without_a_slash_is_asked_for_too(refused, images, monkeypatch):
    monkeypatch.chdir(images.parent)
    assert "did you mean images?" in refused("run", "--data", "imagse")
    assert "did you mean 'demo'?" in refused("run", "--data", "dmeo")


def test_a_command_mistyped_is_asked_for_once(refused):
    assert refused("rn").count("Did you mean 'run'?") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--data", "rows.npz"),
        ("run", "--data", "store:rows.npz"),
        ("run", "--data", "rows.csv"),
        ("run", "--encoder", "rows.npz"),
    ],
)
def test_a_file_of_embeddings_is_sent_to_its_place(refused, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.npz").write_bytes(b"")
    (tmp_path / "rows.csv").write_text("e0,e1,label\n1,2,cat\n")
    assert f"--encoder store:{words[-1].removeprefix('store:')}" in refused(*words)


def test_rows_with_clients_and_no_domains_are_told_the_two_settings(refused, tmp_path):
    x, y = np.eye(4)[np.arange(40) % 4], np.arange(40) % 4
    np.savez(tmp_path / "rows.npz", x=x, y=y, clients=np.array(["a", "b"])[np.arange(40) // 20])
    text = refused("run", "--encoder", f"store:{tmp_path / 'rows.npz'}")
    assert "--set clients.partition=own --set protocol=own-test" in text


def test_a_site_that_is_too_small_is_told_how_to_be_left_out(refused, images):
    for name in ("cat", "dog"):
        (images / "south" / name).mkdir(parents=True)
        (images / "south" / name / "0.png").write_text(f"south {name}")
    assert "--set 'clients.domains=[…]'" in refused("partition", images)


def test_an_experiment_is_told_from_a_run_that_can_be_resumed(refused, tmp_path):
    (tmp_path / "mine" / "0-auto").mkdir(parents=True)
    (tmp_path / "mine" / "mine.toml").write_text("")
    (tmp_path / "mine" / "0-auto" / "manifest.json").write_text("{}")
    text = refused("resume", tmp_path / "mine")
    assert "is an experiment" in text and str(tmp_path / "mine" / "0-auto") in text


def test_verbose_shows_the_traceback_of_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedvlm", "--verbose", "run", "--data", "nowhere/at/all"])
    with pytest.raises(FedVLMError, match="nowhere"):
        cli.main()


@pytest.mark.parametrize("option", ["--source", "--access"])
def test_a_pair_without_a_value_is_refused_by_the_name_of_its_option(refused, images, option):
    assert refused("embed", images, option, "foo") == f"fedvlm: {option} must be KEY=VALUE, got 'foo'\n"
