"""Rows on demand are the rows of the file, whichever way they are asked for."""

from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch

from fedvlm.core import make
from fedvlm.encoders import lazy_rows
from fedvlm.errors import DataError
from fedvlm.testing import check_same, toy_world, train_toy
from tests.helpers.counting import Counting, dataset, numbered, png, run


def sums(values):
    return np.array([crc32(row.tobytes()) for row in values], np.uint32)


@pytest.mark.parametrize("large", [1, 1 << 30])
@pytest.mark.parametrize("order", ["of the file", "another"])
def test_flipped_bit_of_patches_is_refused_when_its_row_is_read(tmp_path, monkeypatch, large, order):
    monkeypatch.setattr(lazy_rows, "MAX_IN_MEMORY_BYTES", large)
    encoder, count = Counting(), 6
    run(numbered(count), encoder, tmp_path, patches=True)
    data = numbered(count) if order == "of the file" else dataset(*map(png, (4, 1, 5, 0, 2, 3)))
    (file,) = tmp_path.glob("*/patches*.rows")
    content = file.read_bytes()
    for place in range(0, len(content), len(content) // 12):
        spoilt = bytearray(content)
        spoilt[place] ^= 1
        file.write_bytes(spoilt)
        with pytest.raises(DataError, match="is damaged"):
            run(data, encoder, tmp_path, patches=True).embedded.patches[np.arange(count)]
    file.write_bytes(content)
    assert len(run(data, encoder, tmp_path, patches=True).embedded.patches[np.arange(count)]) == 6


def test_row_that_is_not_read_is_not_checked_and_one_is_checked_once(tmp_path, monkeypatch):
    values = np.ones((4, 8), np.float16)
    values.tofile(tmp_path / "rows")
    monkeypatch.setattr(lazy_rows, "MAX_IN_MEMORY_BYTES", 1)
    checked_counts = []
    monkeypatch.setattr(lazy_rows, "check_sums", lambda rows, *rest: checked_counts.append(len(rows)))
    array = np.memmap(tmp_path / "rows", np.float16, "c", shape=values.shape)
    rows = lazy_rows.check_and_map(array, sums(values), "rows")
    for index in ([0, 1], [1, 2], [0, 1, 2]):
        rows.take(np.array(index))[slice(None)]
    assert checked_counts == [2, 1, 0]


def test_rows_on_demand_are_those_of_the_file(tmp_path, monkeypatch):
    values = np.random.default_rng(0).standard_normal((50, 3, 4)).astype(np.float16)
    values.tofile(tmp_path / "rows")
    array = np.memmap(tmp_path / "rows", np.float16, "c", shape=values.shape)
    assert isinstance(lazy_rows.check_and_map(array, sums(values), "rows"), torch.Tensor)
    monkeypatch.setattr(lazy_rows, "MAX_IN_MEMORY_BYTES", 1)
    rows = lazy_rows.check_and_map(array, sums(values), "rows")
    assert not isinstance(rows, torch.Tensor) and rows.shape == (50, 3, 4) and len(rows) == 50
    for index in (
        torch.tensor([3, 3, 49]),
        np.array([0, 7]),
        slice(None),
        torch.tensor([], dtype=int),
    ):
        numbers = index.numpy() if isinstance(index, torch.Tensor) else index
        assert np.array_equal(rows[index].numpy(), values[numbers])
    some = rows.take(torch.tensor([10, 20, 30]))
    assert np.array_equal(some[torch.tensor([2, 0])].numpy(), values[[30, 10]])
    assert np.array_equal(rows[torch.arange(50)].numpy(), values)  # also after they were let go


def test_training_on_rows_on_demand_is_training_on_a_tensor(tmp_path, monkeypatch):
    world = toy_world(make("fedotp", n_ctx=3, rounds=1, local_epochs=1))
    world.x.numpy().tofile(tmp_path / "rows")
    monkeypatch.setattr(lazy_rows, "MAX_IN_MEMORY_BYTES", 1)
    array = np.memmap(tmp_path / "rows", np.float16, "c", shape=tuple(world.x.shape))
    lazy = lazy_rows.check_and_map(array, sums(world.x.numpy()), "rows")
    check_same(train_toy(replace(world, x=lazy)), train_toy(world), 1e-5, "the way of reading matters")
