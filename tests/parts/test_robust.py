"""Robust means keep their laws: equal uploads, order, translation, and how many may lie."""

import pytest
import torch

from fedvlm.parts.robust import ROBUST_MEANS, krum_weights, median

ROBUST = sorted(set(ROBUST_MEANS) - {"mean"})
BREAKS = {"median": 4, "trimmed": 3, "krum": 3, "geometric-median": 4}  # of ten, it stands so many


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rule", sorted(ROBUST_MEANS))
@pytest.mark.parametrize("count", [1, 2, 3, 10, 11])
def test_of_equal_uploads_every_rule_gives_their_mean(rule, count):
    upload = draw(7)
    assert torch.allclose(ROBUST_MEANS[rule](upload.expand(count, 7)), upload, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", sorted(ROBUST_MEANS))
@pytest.mark.parametrize("count", [2, 3, 4, 9, 10])
def test_order_of_the_clients_does_not_matter(rule, count):
    x = draw(count, 6)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(ROBUST_MEANS[rule](x[order]), ROBUST_MEANS[rule](x), atol=1e-9)


@pytest.mark.parametrize("rule", sorted(ROBUST_MEANS))
@pytest.mark.parametrize("count", [2, 5, 10])
def test_what_is_added_to_all_uploads_is_added_to_their_mean(rule, count):
    x, offset = draw(count, 6), 100 * draw(6, seed=1)
    assert torch.allclose(ROBUST_MEANS[rule](x + offset), ROBUST_MEANS[rule](x) + offset, atol=1e-7)


@pytest.mark.parametrize("size", [1e2, 1e8, 1e30])
@pytest.mark.parametrize("rule", ROBUST)
def test_a_minority_however_far_leaves_the_mean_among_the_honest(rule, size):
    honest = draw(10, 8)
    for bad in range(1, BREAKS[rule] + 1):
        x = honest.clone()
        x[:bad] = size * draw(8, seed=2)  # all in one place, where it is worst
        radius = (x[bad:] - x[bad:].mean(0)).norm(dim=1).max()
        assert (ROBUST_MEANS[rule](x) - x[bad:].mean(0)).norm() < 3 * radius


@pytest.mark.parametrize("rule", ROBUST)
def test_a_majority_moves_every_rule_as_far_as_it_likes(rule):
    x = draw(10, 8)
    x[:6] = 1e8 + 0 * x[:6]
    assert ROBUST_MEANS[rule](x).norm() > 1e7


def test_the_plain_mean_is_moved_by_one():
    x = draw(10, 8)
    x[0] = 1e8
    assert ROBUST_MEANS["mean"](x).norm() > 1e6


def test_geometric_median_has_the_least_sum_of_distances():
    x = draw(9, 5)
    best = ROBUST_MEANS["geometric-median"](x)

    def total_distance(point):
        return (x - point).norm(dim=1).sum()

    for number in range(20):
        assert total_distance(best) <= total_distance(best + 1e-3 * draw(5, seed=number)) + 1e-9
    assert total_distance(best) < total_distance(x.mean(0))


def test_krum_gives_one_of_the_uploads():
    x = draw(10, 5)
    assert (ROBUST_MEANS["krum"](x) - x).norm(dim=1).min() < 1e-9
    assert krum_weights(x @ x.mT).sum() == 1


def test_median_of_an_even_count_is_between_the_two_in_the_middle():
    assert median(torch.tensor([[1.0], [9.0], [2.0], [4.0]])) == 3
