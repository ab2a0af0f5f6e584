"""What a person gets wrong is told in a line, never as a traceback."""

import errno

import pytest


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
    assert text == "fedvlm: /media/stick/runs: Read-only file system; choose another place\n"


def test_an_operating_system_error_without_a_path_is_told_too(refused, images, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedvlm.data.partition.count_table", full)
    assert refused("partition", images) == "fedvlm: No space left on device; choose another place\n"


@pytest.mark.parametrize("words", ["predict c x.png", "report r", "plot r", "explain r"])
def test_a_folder_is_no_place_for_a_file(refused, tmp_path, words):
    text = refused(*words.split(), "--out", tmp_path)
    assert "--out" in text and "is a directory" in text
