"""Rows on demand are the rows of the file, whichever way they are asked for."""

from dataclasses import replace

import numpy as np
import torch

from fedvlm.core import make
from fedvlm.encoders.cache import mapped
from fedvlm.testing import check_same, learn, toy_world


def test_rows_on_demand_are_those_of_the_file(tmp_path, monkeypatch):
    values = np.random.default_rng(0).standard_normal((50, 3, 4)).astype(np.float16)
    values.tofile(tmp_path / "rows")
    array = np.memmap(tmp_path / "rows", np.float16, "c", shape=values.shape)
    assert isinstance(mapped.opened(array), torch.Tensor)
    monkeypatch.setattr(mapped, "LARGE", 1)
    rows = mapped.opened(array)
    assert not isinstance(rows, torch.Tensor) and rows.shape == (50, 3, 4) and len(rows) == 50
    for index in (
        torch.tensor([3, 3, 49]),
        np.array([0, 7]),
        slice(None),
        torch.tensor([], dtype=int),
    ):
        where = index.numpy() if isinstance(index, torch.Tensor) else index
        assert np.array_equal(rows[index].numpy(), values[where])
    some = rows.take(torch.tensor([10, 20, 30]))
    assert np.array_equal(some[torch.tensor([2, 0])].numpy(), values[[30, 10]])
    assert np.array_equal(rows[torch.arange(50)].numpy(), values)  # also after they were let go


def test_training_on_rows_on_demand_is_training_on_a_tensor(tmp_path, monkeypatch):
    world = toy_world(make("fedotp", vectors=3, rounds=1, epochs=1))
    world.x.numpy().tofile(tmp_path / "rows")
    monkeypatch.setattr(mapped, "LARGE", 1)
    lazy = mapped.opened(np.memmap(tmp_path / "rows", np.float16, "c", shape=tuple(world.x.shape)))
    check_same(learn(replace(world, x=lazy)), learn(world), 1e-5, "the way of reading matters")
