"""Noise of the system's entropy, and the grid that sums with noise are rounded to."""

import math

import numpy as np
import pytest
import torch

from fedvlm.maths import privacy
from fedvlm.maths.privacy import add_noise, grid_step, secure_normal, seeded_normal


@pytest.fixture
def entropy(monkeypatch):
    """The system's entropy by a seed, so that what is measured here is the same every time."""
    draw = np.random.default_rng(7)
    monkeypatch.setattr(privacy.os, "urandom", draw.bytes)


def test_noise_is_standard_normal(entropy):
    """Moments and tails within five standard errors of what a million draws have."""
    count = 1_000_000
    x = secure_normal(count)
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        error = math.sqrt(math.prod(range(1, 2 * power, 2)) - moment**2)  # of x^power
        assert abs(float((x**power).mean()) - moment) < 5 * error / math.sqrt(count)
    for bound in (0.1, 1.0, 2.0, 3.0, 4.0):
        p = math.erfc(bound / math.sqrt(2))
        fraction = float((x.abs() > bound).double().mean())
        assert abs(fraction - p) < 5 * math.sqrt(p * (1 - p) / count)


def test_neighbours_and_pairs_are_not_correlated(entropy):
    """Two numbers come of one radius; neither they nor their squares tell of each other."""
    x = secure_normal(200_000)
    first, second = x[:100_000], x[100_000:]
    pairs = ((x[:-1], x[1:]), (first, second), (first.square() - 1, second.square() - 1))
    for a, b in pairs:
        assert abs(float((a * b).mean())) < 5 * float(a.std() * b.std()) / math.sqrt(len(a))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4)])
def test_any_shape_is_filled_in_float64(shape):
    noise = secure_normal(*shape)
    assert noise.shape == shape and noise.dtype == torch.float64 and noise.isfinite().all()


@pytest.mark.parametrize("byte", [b"\0", b"\xff"])
def test_extreme_entropy_gives_finite_noise(monkeypatch, byte):
    monkeypatch.setattr(privacy.os, "urandom", lambda count: byte * count)
    assert secure_normal(4).isfinite().all() and secure_normal(4).abs().max() < 9.6


def test_no_seed_gives_the_same_noise_again(monkeypatch):
    """With torch's, numpy's and Python's generators all at the same seed, two draws differ."""
    import random

    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        drawn.append(secure_normal(64))
    assert (drawn[0] != drawn[1]).all()
    used = []
    monkeypatch.setattr(torch, "randn", lambda *words, **options: used.append(words))
    secure_normal(8)
    assert not used


def test_a_simulation_draws_by_its_seed():
    first, two = (seeded_normal(torch.Generator().manual_seed(3))(4, 5) for _ in range(2))
    assert torch.equal(first, two) and first.dtype == torch.float64


@pytest.mark.parametrize("deviation", [1e-6, 0.3, 1.0, 8.0, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_with_noise_is_on_the_grid(entropy, deviation, dtype):
    """A power of two, a thousandth of the noise: nothing of a value's own bits is left."""
    value = (deviation * torch.randn(500, generator=torch.Generator().manual_seed(1))).to(dtype)
    out = add_noise(value, deviation, secure_normal(500))
    grid = grid_step(deviation)
    assert deviation / 2048 < grid <= deviation / 1024 and math.frexp(grid)[0] == 0.5
    assert out.dtype == dtype and torch.equal((out / grid).round() * grid, out)


def test_the_grid_moves_a_sum_by_half_a_step_at_most(entropy):
    value, normal = torch.linspace(-3, 3, 1000, dtype=torch.float64), secure_normal(1000)
    moved = add_noise(value, 0.7, normal) - (value + 0.7 * normal)
    assert moved.abs().max() <= grid_step(0.7) / 2
    assert moved.abs().max() > grid_step(0.7) / 4  # it does round


def test_two_values_can_become_the_same_sum(entropy):
    """Without a grid almost no sum of one value is a sum of the other: the last bits tell."""
    normal = secure_normal(20_000)
    first, second = torch.tensor(0.1), torch.tensor(0.1000001)
    bare = [set((value.double() + 0.01 * normal).tolist()) for value in (first, second)]
    rounded = [set(add_noise(value.expand(20_000), 0.01, normal).tolist()) for value in (first, second)]
    assert not bare[0] & bare[1]
    assert len(rounded[0] & rounded[1]) > 0.9 * len(rounded[0])


def test_without_noise_nothing_is_rounded():
    value = torch.tensor([0.1, 1 / 3])
    assert add_noise(value, 0.0, secure_normal(2)) is value
