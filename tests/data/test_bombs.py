"""Archives, folders and stores that would take memory or wait for ever."""

import os
import struct
import tracemalloc
import zipfile
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from fedvlm.data import open_dataset
from fedvlm.data import sources as data_sources
from fedvlm.encoders.cache.embed import DatasetImages
from fedvlm.encoders.store import open_store
from fedvlm.errors import DataError
from tests.helpers.trees import grid, image, plant


@contextmanager
def at_most(size):
    """What is allocated inside, at any moment, stays below a number of bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def archive(path, data, how=zipfile.ZIP_DEFLATED, claimed=None):
    """A .zip of two classes whose last member unpacks to `data`, and may claim another size."""
    with zipfile.ZipFile(path, "w", how) as made:
        made.writestr("a/0.png", image("a"))
        made.writestr("b/0.png", data)
    if claimed is not None:
        raw = path.read_bytes()
        path.write_bytes(raw.replace(struct.pack("<I", len(data)), struct.pack("<I", claimed)))
    return path


@pytest.mark.parametrize("claimed", [None, 10])
def test_member_past_the_limit_is_refused_before_it_is_unpacked(tmp_path, monkeypatch, claimed):
    monkeypatch.setattr(data_sources, "MAX_IMAGE_BYTES", 1 << 20)
    source = open_dataset(str(archive(tmp_path / "a.zip", bytes(64 << 20), claimed=claimed))).source
    with at_most(20 << 20), pytest.raises(DataError, match="b/0.png"):
        source.read(1)
    assert source.read(0) == image("a")


def test_member_packed_in_a_way_without_a_limit_is_refused(tmp_path):
    with pytest.raises(DataError, match="deflate"):
        open_dataset(str(archive(tmp_path / "a.zip", image("b"), zipfile.ZIP_LZMA)))


def test_file_past_the_limit_is_named_and_not_read(tmp_path, monkeypatch):
    root = plant(tmp_path / "set", grid(["x"], ["a", "b"]))
    monkeypatch.setattr(data_sources, "MAX_IMAGE_BYTES", 10_000)
    with open(root / "x/a/0.png", "ab") as file:
        file.truncate(20_000)
    source = open_dataset(str(root)).source
    with pytest.raises(DataError, match=r"x/a/0\.png.*10,000"):
        source.read(0)
    assert source.read(1) == image("x/a/1.png")


def test_fifo_in_a_folder_is_named_and_skipped_and_never_opened(tmp_path, monkeypatch):
    root = plant(tmp_path / "set", grid(["x"], ["a", "b"], rows=20))
    os.mkfifo(root / "x/a/waiting.png")
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(str(path)) or real(path, *rest))
    images = DatasetImages(open_dataset(str(root)))
    assert [name for name, _ in images.skipped()] == ["x/a/waiting.png"]
    assert "FIFO" in images.skipped()[0][1]
    assert len(images.readable_rows()) == 40
    assert not [path for path in opened if path.endswith("waiting.png")]


def test_special_files_are_no_images_and_do_not_count_as_unreadable_ones(tmp_path):
    """Of twelve, one that cannot be read would be more than 5 %."""
    root = plant(tmp_path / "set", grid(["x"], ["a", "b"], rows=6))
    for name in ("one.png", "two.png", "three.jpg"):
        os.mkfifo(root / "x/a" / name)
    images = DatasetImages(open_dataset(str(root)))
    assert len(images.skipped()) == 3 and len(images.readable_rows()) == 12
    dataset = open_dataset(str(root))
    (root / "x/b/0.png").unlink()
    with pytest.raises(DataError, match="1 of the 12 images"):
        DatasetImages(dataset)


def test_device_is_named_and_not_read():
    with pytest.raises(DataError, match="/dev/null is a device"):
        data_sources.Files(Path("/dev"), ["null"]).read(0)


def test_fifo_called_json_does_not_hold_up_the_guess_of_a_folder(tmp_path):
    root = plant(tmp_path / "set", grid(["x"], ["a", "b"]))
    os.mkfifo(root / "notes.json")
    assert len(open_dataset(str(root)).labels) == 4


def test_npz_that_unpacks_to_far_more_is_refused_before_it_is(tmp_path):
    bomb = tmp_path / "bomb.npz"
    np.savez_compressed(bomb, x=np.zeros((100 << 10, 256), np.float32), y=np.zeros(100 << 10, int))
    assert bomb.stat().st_size < 1 << 20
    with at_most(20 << 20), pytest.raises(DataError, match="unpack"):
        open_store(bomb)


def test_npz_larger_than_the_memory_is_refused(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", x=np.eye(4, dtype=np.float32), y=np.arange(4))
    monkeypatch.setattr("fedvlm.encoders.store.free_memory", lambda: 100)
    with pytest.raises(DataError, match="memory"):
        open_store(tmp_path / "a.npz")


def test_npz_whose_header_claims_more_than_there_is_is_refused(tmp_path):
    head = BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 1 << 10)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as made:
        made.writestr("x.npy", head.getvalue() + bytes(100))
    with pytest.raises(DataError, match="cannot be read"):
        open_store(tmp_path / "a.npz")


@pytest.mark.parametrize("label", [1 << 16, 1 << 40])
def test_label_that_would_make_a_million_million_classes_is_refused(tmp_path, label):
    np.savez(tmp_path / "a.npz", x=np.eye(4, dtype=np.float32), y=np.array([0, 1, 2, label]))
    with pytest.raises(DataError, match="row 3 has label"):
        open_store(tmp_path / "a.npz")
