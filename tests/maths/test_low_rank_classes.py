"""A client's rule in the prior's eigenbasis is that of its own Cholesky factor."""

import pytest
import torch

from fedvlm.maths import gaussian_classes
from fedvlm.tensors import remember_latest

CLASSES, DIM = 8, 96
PLAIN = gaussian_classes.fit_low_rank
unit = torch.nn.functional.normalize


def rows(count, seed, classes=7):
    """In a cone, as encoders make them, with directions of unequal spread; the last has none."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(99))
    y = torch.randint(classes, (count,), generator=draw)
    wide = torch.linspace(0, -3, DIM).exp() * 4
    x = centres[y] + 3 * torch.ones(DIM) + wide * torch.randn(count, DIM, generator=draw)
    return unit(x, dim=1), y


def fit_both_ways(prior, x, y, alpha, shrinkage, kind):
    """Weight, bias and left-out logits: by a Cholesky factor, and in the basis."""
    prior = gaussian_classes.Moments(*(tensor.to(kind) for tensor in prior))
    weight = torch.full((len(y),), 1 + alpha, dtype=kind)
    posterior = gaussian_classes.posterior_moments(prior, x, y, alpha)
    rule = gaussian_classes.fit_discriminant(posterior, gaussian_classes.ridge(posterior, shrinkage))
    leave_one_out = gaussian_classes.leave_one_out_logits(posterior, rule, x, y, weight)
    discriminant = gaussian_classes.fit_low_rank(gaussian_classes.eigenbasis(prior), x, y, alpha, shrinkage)
    low_rank_logits = gaussian_classes.leave_one_out_from_products(
        discriminant.products, discriminant.counts, y, weight, DIM
    )
    return (rule.weight, rule.bias, leave_one_out), (discriminant.weight, discriminant.bias, low_rank_logits)


def moments_of(x, y):
    return gaussian_classes.moments_from_sums(*gaussian_classes.class_sums(x, y, CLASSES))


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("shrinkage", [0.1, 1.0, 10.0])
def test_the_basis_gives_what_a_factor_of_its_own_gives(kind, tolerance, alpha, shrinkage):
    x, y = rows(40, 1)
    prior = moments_of(torch.cat([x, rows(400, 2)[0]]), torch.cat([y, rows(400, 2)[1]]))
    exact, _ = fit_both_ways(prior, x, y, alpha, shrinkage, torch.float64)
    _, low_rank = fit_both_ways(prior, x, y, alpha, shrinkage, kind)
    for actual, expected in zip(low_rank, exact, strict=True):
        is_present = expected != gaussian_classes.ABSENT_CLASS_LOGIT
        assert torch.equal(actual != gaussian_classes.ABSENT_CLASS_LOGIT, is_present)
        assert (actual - expected)[is_present].abs().max() <= tolerance * expected[is_present].abs().max()


@pytest.mark.parametrize("shots", [0, 1, 2])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_few_or_no_rows_are_no_trouble(shots, alpha):
    """Without any scatter the classes are told by their means alone, as with a factor."""
    x, y = rows(CLASSES, 3)
    y = torch.arange(CLASSES) % 7
    x, y = x[:shots], y[:shots]
    exact, low_rank = fit_both_ways(moments_of(*rows(7, 4)), x, y, alpha, 1.0, torch.float64)
    for actual, expected in zip(low_rank, exact, strict=True):
        assert actual.isfinite().all()
        assert torch.allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_padding_changes_nothing():
    x, y = rows(20, 5)
    prior = moments_of(*rows(200, 6))
    padded = torch.cat([x, torch.full((4, DIM), 7.0)]), torch.cat([y, torch.full((4,), -1)])
    _, plain = fit_both_ways(prior, x, y, 1.0, 1.0, torch.float64)
    _, wide = fit_both_ways(prior, *padded, 1.0, 1.0, torch.float64)
    for plain_tensor, wide_tensor in zip(plain, wide, strict=True):
        assert torch.allclose(plain_tensor, wide_tensor[: len(plain_tensor)], atol=1e-8)


@pytest.mark.parametrize(("count", "shrinkage"), [(DIM // 2, 1.0), (DIM, 1.0), (20, 0.01)])
def test_a_client_with_many_rows_or_hardly_a_ridge_takes_the_factor(count, shrinkage, monkeypatch):
    """Both ways lead to the same; which is taken hangs on sizes and settings, not on values."""
    x, y = rows(count, 7)
    total = gaussian_classes.pack_statistics(*gaussian_classes.packed_class_sums(*rows(300, 8), CLASSES), 512)
    prior = gaussian_classes.pooled_prior(total, 512, 1.0)
    calls = []
    monkeypatch.setattr(
        gaussian_classes, "fit_low_rank", lambda *arguments: calls.append(arguments) or PLAIN(*arguments)
    )
    discriminant = gaussian_classes.fit_client_discriminant(prior, x, y, 1.0, shrinkage)
    assert bool(calls) == (count == DIM // 2)
    monkeypatch.setattr(gaussian_classes, "LOW_RANK_DIM_RATIO", 0 if not calls else 99)
    monkeypatch.setattr(gaussian_classes, "LOW_RANK_MIN_SHRINKAGE", 0.0)
    factored = gaussian_classes.fit_client_discriminant(prior, x, y, 1.0, shrinkage)
    assert (discriminant.weight - factored.weight).abs().max() < 1e-4 * factored.weight.abs().max()


def test_what_is_remembered_is_of_the_very_same_numbers():
    calls = []
    twice = remember_latest(lambda tensor: calls.append(1) or 2 * tensor)
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
    twice = remember_latest(lambda tensor: calls.append(1) or 2 * tensor)
    matrix = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(torch.func.vmap(twice)(matrix), 2 * matrix)
    assert torch.equal(torch.func.vmap(twice)(matrix + 1), 2 * matrix + 2)
    with torch.inference_mode():
        other_tensor = torch.ones(2)
    assert torch.equal(twice(other_tensor), twice(other_tensor)) and len(calls) == 4
