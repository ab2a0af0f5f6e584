"""Rows in a file: what is read is what was written, wherever in the file and in whatever order."""

import os

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fedvlm.errors import DataError
from fedvlm.storage import large_tensors

X = torch.arange(3000 * 8).reshape(3000, 8).float()


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A map of a file that begins with something else, and a file without a name."""
    monkeypatch.setattr(large_tensors, "MAX_IN_MEMORY_BYTES", 1000)
    save_file({"x": X, "a": torch.ones(5)}, tmp_path / "rows.safetensors")
    with safe_open(tmp_path / "rows.safetensors", "pt") as file:
        mapped = file.get_tensor("x")
    return {"named": mapped, "unnamed": large_tensors.concatenate_rows(tmp_path, X.shape, X.split(700))}


@pytest.mark.parametrize("kind", ["named", "unnamed"])
@pytest.mark.parametrize("gap", [0, 64, 1 << 14])
def test_rows_of_a_file_are_read_in_any_order_and_any_number_of_times(rows, monkeypatch, kind, gap):
    monkeypatch.setattr(large_tensors, "MAX_GAP_BYTES", gap)
    monkeypatch.setattr(large_tensors, "MAX_BUFFERS_PER_CALL", 7)
    reader = large_tensors.page_rows(rows[kind])
    assert reader is not None
    draw = np.random.default_rng(0)
    for count in (0, 1, 2, 40, 4000):
        index = draw.integers(0, len(X), count)
        assert torch.equal(reader.take(index), X[index])
    assert torch.equal(reader.read(np.arange(len(X))), X)


def test_rows_in_memory_and_few_rows_are_read_as_ever(rows, monkeypatch):
    assert large_tensors.page_rows(X) is None and large_tensors.page_rows("no tensor") is None
    monkeypatch.setattr(large_tensors, "MAX_IN_MEMORY_BYTES", 1 << 20)
    assert large_tensors.page_rows(rows["named"]) is None


def test_a_pass_over_all_rows_sees_each_once_also_when_pages_are_let_go(rows, monkeypatch):
    monkeypatch.setattr(large_tensors, "CHUNK_BYTES", 5000)
    for table in (*rows.values(), X):
        starts, parts = zip(*large_tensors.iterate_chunks(table), strict=True)
        assert torch.equal(torch.cat(parts), X) and torch.equal(table, X)
        assert starts[1] == len(parts[0])


def test_a_file_that_became_shorter_is_refused_and_one_that_is_gone_is_not_looked_for(rows, tmp_path):
    short = tmp_path / "short"
    short.write_bytes(X[:1500].numpy().tobytes())
    reader = large_tensors.PagedRows(X, os.open(short, os.O_RDONLY), 0)
    assert torch.equal(reader.take(np.arange(1500)), X[:1500])
    with pytest.raises(DataError, match="shorter"):
        reader.take(np.arange(1400, 1600))
    (tmp_path / "rows.safetensors").unlink()
    assert large_tensors.page_rows(rows["named"]) is None


def test_files_of_two_disks_with_one_inode_are_told_apart(rows, tmp_path, monkeypatch):
    """As if the file without a name, on another disk, had the inode of the one with a name."""
    shared = (tmp_path / "rows.safetensors").stat().st_ino
    descriptor = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.write(descriptor, b"\0" * 2 * X.nbytes)
    monkeypatch.setitem(large_tensors._descriptors, shared, descriptor)
    index = np.arange(0, len(X), 7)
    for table in rows.values():
        assert torch.equal(large_tensors.page_rows(table).take(index), X[index])
    os.close(descriptor)


def test_a_file_without_a_name_goes_with_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(large_tensors, "MAX_IN_MEMORY_BYTES", 1000)
    before = dict(large_tensors._descriptors)
    rows = large_tensors.concatenate_rows(tmp_path, X.shape, [X])
    assert not list(tmp_path.iterdir()) and len(large_tensors._descriptors) == len(before) + 1
    del rows
    assert large_tensors._descriptors == before
