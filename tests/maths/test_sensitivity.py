"""The noise on class statistics is for the worst pair of data sets: a search finds none that differ more."""

import math
from itertools import product

import pytest
import torch

from fedvlm.maths.gaussian_classes import SENSITIVITY, count_noise_values, packed_class_sums, released_class_sums
from fedvlm.maths.privacy import epsilon, find_noise_multiplier

CLASSES = 3


def statistics(x, y):
    counts, sums, second = packed_class_sums(x, y, CLASSES)
    return torch.cat([counts, sums.flatten(), second])


def change(first, second, label, other):
    """How far the statistics move if a sample is replaced."""
    return (statistics(first[None], label[None]) - statistics(second[None], other[None])).norm()


def unit(values):
    return values / values.norm().clamp(min=1)  # as an upload has it: shorter samples stay


@pytest.mark.parametrize("dim", [2, 3, 8])
@pytest.mark.parametrize(("label", "other"), [(0, 0), (0, 1)])
def test_a_search_finds_no_worse_pair_of_samples(dim, label, other):
    label, other = torch.tensor(label), torch.tensor(other)
    worst = 0.0
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        pair = torch.randn(2, dim, generator=draw, dtype=torch.float64).requires_grad_()
        optimiser = torch.optim.Adam([pair], lr=0.05)
        for _ in range(300):
            optimiser.zero_grad()
            distance = change(unit(pair[0]), unit(pair[1]), label, other)
            (-distance).backward()
            optimiser.step()
        worst = max(worst, float(distance.detach()))
    assert worst <= SENSITIVITY + 1e-9
    # of one class: at an angle of 120°; of two classes: at a right angle, which is the bound
    assert worst == pytest.approx(math.sqrt(6) if label != other else math.sqrt(4.5), abs=0.02)


def test_a_sample_more_or_less_changes_less_than_one_replaced():
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        x = unit(torch.randn(5, generator=draw, dtype=torch.float64))
        assert float(statistics(x[None], torch.tensor([1])).norm()) <= math.sqrt(3) + 1e-9 < SENSITIVITY


def test_longer_samples_are_shortened_before_noise():
    x, y = torch.tensor([[30.0, 40.0], [0.3, 0.4]]), torch.tensor([0, 1])
    noise = torch.zeros(count_noise_values(CLASSES, 2))
    allowed = torch.ones(CLASSES, dtype=torch.bool)
    _, sums, _ = released_class_sums(x, y, allowed, 1, 1e-6, noise)
    assert sums[0].tolist() == pytest.approx([0.6, 0.8], abs=1e-4)
    assert sums[1].tolist() == pytest.approx([0.3, 0.4], abs=1e-4)


def test_with_noise_and_no_minimum_every_allowed_class_leaves():
    """Which classes a site has would else be told by counts with little noise."""
    x, y, allowed = torch.eye(2)[:1], torch.tensor([0]), torch.tensor([True, True, False])
    noise = -torch.ones(count_noise_values(CLASSES, 2))
    counts, sums, _ = released_class_sums(x, y, allowed, 1, 1.0, noise)
    assert (counts[:2] < 0).all() and counts[2] == 0 and (sums[:2] != 0).all() and not sums[2].any()


@pytest.mark.parametrize(("target", "releases"), list(product((0.5, 1.0, 4.0, 10.0), (1, 3))))
def test_the_noise_that_is_found_has_the_asked_epsilon(target, releases):
    found = find_noise_multiplier(target, releases)
    assert epsilon(found, releases) <= target < epsilon(found / 1.002, releases)
