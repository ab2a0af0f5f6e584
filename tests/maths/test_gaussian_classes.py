"""The Gaussian posterior by its laws: sums add up, however rows are split, and nothing is NaN."""

import pytest
import torch
from torch.func import vmap

from fedvlm.maths import gaussian_classes
from fedvlm.maths.gaussian_classes import ABSENT_CLASS_LOGIT

CLASSES, DIM = 5, 12


def rows(count=60, classes=4, seed=0, spread=0.5):
    """Rows of unit norm; the last of CLASSES has none."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=draw)
    y = torch.randint(classes, (count,), generator=draw)
    x = centres[y] + spread * torch.randn(count, DIM, generator=draw)
    return torch.nn.functional.normalize(x, dim=1), y


def moments_of(x, y):
    return gaussian_classes.moments_from_sums(*gaussian_classes.class_sums(x, y, CLASSES))


def nothing():
    return gaussian_classes.Moments(
        torch.zeros(CLASSES).double(), torch.zeros(CLASSES, DIM).double(), torch.zeros(DIM, DIM)
    )


def fitted(moments, shrinkage=1.0):
    return gaussian_classes.fit_discriminant(moments, gaussian_classes.ridge(moments, shrinkage))


def gap(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("n_clients", [1, 2, 7, 60])
@pytest.mark.parametrize("shift", [0.0, 20.0])
def test_federated_statistics_are_pooled_ones_however_rows_are_split(n_clients, shift):
    """Also through the wire's fixed point, and where the mean is far larger than the scatter."""
    x, y = rows()
    x = torch.nn.functional.normalize(x + shift * torch.ones(DIM) / DIM**0.5, dim=1)
    pooled = moments_of(x, y)
    total = [0, 0, 0]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(n_clients))
    for part in order.tensor_split(n_clients):
        counts, sums, second = gaussian_classes.class_sums(x[part], y[part], CLASSES)
        wire = (
            counts,
            gaussian_classes.to_fixed_point(sums, 64),
            gaussian_classes.to_fixed_point(gaussian_classes.pack(second), 64),
        )
        total = [old + upload.long() for old, upload in zip(total, wire, strict=True)]
    again = gaussian_classes.moments_from_sums(
        total[0].double(),
        gaussian_classes.from_fixed_point(total[1], 64),
        gaussian_classes.unpack(gaussian_classes.from_fixed_point(total[2], 64), DIM),
    )
    assert torch.equal(again.counts, pooled.counts)
    assert gap(again.means, pooled.means) < 1e-6
    assert gap(again.scatter, pooled.scatter) < (1e-5 if not shift else 1e-3)


def test_float32_moments_lose_what_the_fixed_point_keeps():
    """Rows of a cone, as encoders make them: the scatter is small beside what it is taken from."""
    x, y = rows(4000, spread=0.05)
    x = torch.nn.functional.normalize(x + 5, dim=1)
    exact = moments_of(x, y).scatter
    counts, sums, second = gaussian_classes.class_sums(x, y, CLASSES)
    fixed = gaussian_classes.moments_from_sums(
        counts,
        gaussian_classes.from_fixed_point(gaussian_classes.to_fixed_point(sums, 4096), 4096),
        gaussian_classes.from_fixed_point(gaussian_classes.to_fixed_point(second, 4096), 4096),
    )
    single = gaussian_classes.moments_from_sums(counts, sums.float().double(), second.float().double())
    assert gap(fixed.scatter, exact) < gap(single.scatter, exact) / 5


def test_a_triangle_holds_the_whole_square():
    square = torch.randn(3, DIM, DIM)
    square = square + square.mT
    packed = gaussian_classes.pack(square)
    assert packed.shape == (3, DIM * (DIM + 1) // 2)
    assert torch.equal(gaussian_classes.unpack(packed, DIM), square)


def test_posterior_without_prior_is_the_local_one():
    x, y = rows()
    local, prior = moments_of(x, y), moments_of(*rows(seed=1))
    for posterior in (
        gaussian_classes.posterior_moments(prior, x, y, 0.0),
        gaussian_classes.posterior_moments(nothing(), x, y, 1.0),
    ):
        for a, b in zip(posterior, local, strict=True):
            assert torch.allclose(a, b, atol=1e-12)


def test_posterior_with_whole_prior_is_that_of_all_rows_together():
    x, y = rows()
    others_x, others_y = rows(seed=1)
    posterior = gaussian_classes.posterior_moments(moments_of(others_x, others_y), x, y, 1.0)
    pooled = moments_of(torch.cat([x, others_x]), torch.cat([y, others_y]))
    for a, b in zip(posterior, pooled, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_scatter_of_the_posterior_is_positive_semidefinite(alpha):
    x, y = rows(7)
    posterior = gaussian_classes.posterior_moments(moments_of(*rows(seed=2)), x, y, alpha)
    assert torch.linalg.eigvalsh(posterior.scatter).min() > -1e-12


def test_discriminant_is_linear_discriminant_analysis():
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    x, y = rows(400)
    x, y = torch.cat([x[y == c][:80] for c in range(4)]), torch.arange(4).repeat_interleave(80)
    oracle = LinearDiscriminantAnalysis(solver="lsqr").fit(x.double(), y)
    rule = fitted(moments_of(x, y), 1e-9)
    actual = rule.logits(x.double())[:, :4]
    actual, theirs = (
        scores - scores.mean(1, keepdim=True)
        for scores in (actual, torch.from_numpy(oracle.decision_function(x.double())))
    )
    ratio = ((actual * theirs).sum() / theirs.square().sum()).item()
    assert ratio == pytest.approx((320 + DIM + 2) / 320)  # theirs divides by the rows, not ν + d + 2
    assert gap(actual, ratio * theirs) < 1e-6


def test_one_row_per_class_gives_the_nearest_mean():
    x, _ = rows(CLASSES, spread=1.0)
    y = torch.arange(CLASSES)
    rule = fitted(moments_of(x, y))
    new = torch.nn.functional.normalize(torch.randn(50, DIM), dim=1)
    nearest = torch.cdist(new, x).argmin(1)
    assert torch.equal(rule.logits(new.double()).argmax(1), nearest)


@pytest.mark.parametrize("case", ["nobody", "one row", "one class", "a class nobody has"])
def test_missing_classes_give_finite_logits_and_are_never_chosen(case):
    x, y = rows()
    x, y = {"nobody": (x[:0], y[:0]), "one row": (x[:1], y[:1]), "one class": (x, 0 * y)}.get(case, (x, y))
    rule = fitted(moments_of(x, y))
    logits = rule.logits(rows(seed=3)[0].double())
    assert logits.isfinite().all()
    absent = [c for c in range(CLASSES) if c not in y.tolist()]
    assert (rule.bias[absent] == ABSENT_CLASS_LOGIT).all()
    if len(y):
        assert not set(logits.argmax(1).tolist()) & set(absent)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_leaving_a_row_out_is_fitting_without_it(alpha):
    """The row leaves the prior as well; class 4 has one row and is gone without it."""
    x, y = rows(40)
    y[0] = 4
    posterior = gaussian_classes.posterior_moments(moments_of(x, y), x, y, alpha)
    ridge = gaussian_classes.ridge(posterior, 1.0)
    rule = gaussian_classes.fit_discriminant(posterior, ridge)
    weight = torch.full((40,), 1 + alpha, dtype=torch.float64)
    fast = gaussian_classes.leave_one_out_logits(posterior, rule, x, y, weight)
    for row in range(40):
        keep = torch.arange(40) != row
        prior = moments_of(x[keep], y[keep])
        slow = gaussian_classes.fit_discriminant(
            gaussian_classes.posterior_moments(prior, x[keep], y[keep], alpha), ridge
        ).logits(x[row : row + 1].double())[0]
        present_classes = [0, 1, 2, 3] if row == 0 else [0, 1, 2, 3, 4]
        assert gap(fast[row, present_classes].diff(), slow[present_classes].diff()) < 1e-9
    assert fast[0, 4] == ABSENT_CLASS_LOGIT


def test_padding_and_batching_change_nothing():
    x, y = rows()
    prior = moments_of(*rows(seed=1))

    def fit_and_leave_out(x, y):
        posterior = gaussian_classes.posterior_moments(prior, x, y, 1.0)
        rule = fitted(posterior)
        weight = torch.full_like(y, 2).double()
        return rule.weight, rule.bias, gaussian_classes.leave_one_out_logits(posterior, rule, x, y, weight)[:60]

    padded = torch.cat([x, torch.full((5, DIM), 7.0)]), torch.cat([y, torch.full((5,), -1)])
    stacked_results = vmap(fit_and_leave_out)(torch.stack([padded[0]] * 3), torch.stack([padded[1]] * 3))
    for plain, wide, stacked in zip(fit_and_leave_out(x, y), fit_and_leave_out(*padded), stacked_results, strict=True):
        assert torch.allclose(wide, plain, atol=1e-9)
        assert torch.allclose(stacked[1], plain, atol=1e-9)


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-3)])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_posterior_and_its_rule_are_those_of_the_direct_inverse(alpha, kind, tolerance):
    """Term by term as printed, and G by inverting; relative to the largest number."""
    x, y = rows(classes=CLASSES)
    before = moments_of(*rows(seed=1, classes=CLASSES))
    prior = gaussian_classes.Moments(*(tensor.to(kind) for tensor in before))
    posterior = gaussian_classes.posterior_moments(prior, x.to(kind), y, alpha)
    rule = gaussian_classes.fit_discriminant(posterior, gaussian_classes.ridge(posterior, 1.0))
    scatter = alpha * before.scatter
    for c in range(len(before.counts)):
        class_samples = x[y == c].double()
        mean, prior_count = class_samples.mean(0), alpha * before.counts[c]
        shift = mean - before.means[c]
        scatter = scatter + (class_samples - mean).mT @ (class_samples - mean)
        scatter = scatter + prior_count * len(class_samples) / (prior_count + len(class_samples)) * torch.outer(
            shift, shift
        )
    assert (posterior.scatter - scatter).abs().max() <= tolerance * scatter.abs().max()
    exact = gaussian_classes.Moments(posterior.counts.double(), posterior.means.double(), scatter)
    ridge = gaussian_classes.ridge(exact, 1.0)
    inverse = torch.linalg.inv(scatter + ridge * torch.eye(DIM))
    offset = exact.means - exact.means.mean(0)
    weight = (exact.counts.sum() + DIM + 2) * offset @ inverse
    assert (rule.weight - weight).abs().max() <= tolerance * weight.abs().max()
