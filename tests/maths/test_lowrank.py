"""A client's rule in the prior's eigenbasis is that of its own Cholesky factor."""

import pytest
import torch

from fedvlm.maths import gaussian, lowrank, prototypes
from fedvlm.tensors import latest

CLASSES, DIM = 8, 96
PLAIN = lowrank.own
unit = torch.nn.functional.normalize


def rows(count, seed, classes=7):
    """In a cone, as encoders make them, with directions of unequal spread; the last has none."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(99))
    y = torch.randint(classes, (count,), generator=draw)
    wide = torch.linspace(0, -3, DIM).exp() * 4
    x = centres[y] + 3 * torch.ones(DIM) + wide * torch.randn(count, DIM, generator=draw)
    return unit(x, dim=1), y


def both(prior, x, y, alpha, shrinkage, kind):
    """Weight, bias and left-out logits: by a Cholesky factor, and in the basis."""
    prior = gaussian.Moments(*(one.to(kind) for one in prior))
    weight = torch.full((len(y),), 1 + alpha, dtype=kind)
    known = gaussian.posterior(prior, x, y, alpha)
    rule = gaussian.discriminant(known, gaussian.ridge(known, shrinkage))
    left = gaussian.left_out(known, rule, x, y, weight)
    own = lowrank.own(lowrank.basis(prior), x, y, alpha, shrinkage)
    ours = gaussian.without_each(own.apart, own.counts, y, weight, DIM)
    return (rule.weight, rule.bias, left), (own.weight, own.bias, ours)


def known(x, y):
    return gaussian.centred(*gaussian.raw(x, y, CLASSES))


@pytest.mark.parametrize(("kind", "most"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("shrinkage", [0.1, 1.0, 10.0])
def test_the_basis_gives_what_a_factor_of_its_own_gives(kind, most, alpha, shrinkage):
    x, y = rows(40, 1)
    prior = known(torch.cat([x, rows(400, 2)[0]]), torch.cat([y, rows(400, 2)[1]]))
    exact, _ = both(prior, x, y, alpha, shrinkage, torch.float64)
    _, ours = both(prior, x, y, alpha, shrinkage, kind)
    for one, other in zip(ours, exact, strict=True):
        there = other != gaussian.NEVER
        assert torch.equal(one != gaussian.NEVER, there)
        assert (one - other)[there].abs().max() <= most * other[there].abs().max()


@pytest.mark.parametrize("shots", [0, 1, 2])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_few_or_no_rows_are_no_trouble(shots, alpha):
    """Without any scatter the classes are told by their means alone, as with a factor."""
    x, y = rows(CLASSES, 3)
    y = torch.arange(CLASSES) % 7
    x, y = x[:shots], y[:shots]
    exact, ours = both(known(*rows(7, 4)), x, y, alpha, 1.0, torch.float64)
    for one, other in zip(ours, exact, strict=True):
        assert one.isfinite().all()
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_padding_changes_nothing():
    x, y = rows(20, 5)
    prior = known(*rows(200, 6))
    padded = torch.cat([x, torch.full((4, DIM), 7.0)]), torch.cat([y, torch.full((4,), -1)])
    _, plain = both(prior, x, y, 1.0, 1.0, torch.float64)
    _, wide = both(prior, *padded, 1.0, 1.0, torch.float64)
    for one, other in zip(plain, wide, strict=True):
        assert torch.allclose(one, other[: len(one)], atol=1e-8)


@pytest.mark.parametrize(("count", "shrinkage"), [(DIM // 2, 1.0), (DIM, 1.0), (20, 0.01)])
def test_a_client_with_many_rows_or_hardly_a_ridge_takes_the_factor(count, shrinkage, monkeypatch):
    """Both ways lead to the same; which is taken hangs on sizes and settings, not on values."""
    x, y = rows(count, 7)
    total = prototypes.packed(*gaussian.sums_over(*rows(300, 8), CLASSES), 512)
    prior = prototypes.prior(total, 512, 1.0)
    taken = []
    monkeypatch.setattr(lowrank, "own", lambda *given: taken.append(given) or PLAIN(*given))
    found = prototypes.own(prior, x, y, 1.0, shrinkage)
    assert bool(taken) == (count == DIM // 2)
    monkeypatch.setattr(prototypes, "FEW", 0 if not taken else 99)
    monkeypatch.setattr(prototypes, "STEADY", 0.0)
    other = prototypes.own(prior, x, y, 1.0, shrinkage)
    assert (found.weight - other.weight).abs().max() < 1e-4 * other.weight.abs().max()


def test_what_is_remembered_is_of_the_very_same_numbers():
    calls = []
    twice = latest(lambda one: calls.append(1) or 2 * one)
    a, b = torch.ones(3), torch.ones(3)
    assert twice(a) is twice(a) and len(calls) == 1
    assert twice(a[:]) is twice(a) and len(calls) == 1  # a view of the same
    twice(b)
    assert len(calls) == 2
    b += 1
    assert torch.equal(twice(b), torch.full((3,), 4.0))
    assert torch.equal(twice(b[:2]), torch.full((2,), 4.0))


def test_nothing_is_remembered_of_tensors_without_a_place_or_a_version():
    calls = []
    twice = latest(lambda one: calls.append(1) or 2 * one)
    many = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(torch.func.vmap(twice)(many), 2 * many)
    assert torch.equal(torch.func.vmap(twice)(many + 1), 2 * many + 2)
    with torch.inference_mode():
        apart = torch.ones(2)
    assert torch.equal(twice(apart), twice(apart)) and len(calls) == 4
