"""Samples of the Fisher information and the two ways of joining prompts, by their laws."""

from itertools import pairwise

import pytest
import torch
from torch.func import jacrev

from fedvlm.maths.fisher import find_mode, sample_fisher, solve_kronecker_mean

CLASSES, VECTORS, WIDTH, DIM, ROWS = 3, 2, 4, 5, 6


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHT = draw(CLASSES * DIM, VECTORS * WIDTH, seed=1)


def features(context):
    """A made text tower: (vectors, width) -> (classes, dim) unit-norm."""
    table = torch.tanh(WEIGHT @ context.reshape(-1))
    return torch.nn.functional.normalize(table.reshape(CLASSES, DIM), dim=1)


def positive(size, seed):
    factor = draw(size, size, seed=seed)
    return factor @ factor.mT + 0.1 * torch.eye(size, dtype=torch.float64)


def test_samples_average_to_the_fisher_information():
    context, scale = draw(VECTORS, WIDTH, seed=2), 4.0
    x = torch.nn.functional.normalize(draw(ROWS, DIM, seed=3), dim=1)
    real = torch.tensor([True] * (ROWS - 1) + [False])
    jacobian = jacrev(lambda c: scale * x @ features(c).mT)(context).reshape(ROWS, CLASSES, -1)
    p = (scale * x @ features(context).mT).softmax(dim=1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    exact = (jacobian.mT @ middle @ jacobian)[real].sum(dim=0)
    signs = draw(4000, ROWS, CLASSES, seed=4).sign()
    samples = torch.func.vmap(lambda s: sample_fisher(features, context, x, real, scale, s))(signs)
    flat = samples.reshape(len(signs), -1)
    estimate = flat.mT @ flat / len(signs)
    assert (estimate - exact).norm() < 0.05 * exact.norm()


def test_blending_one_client_returns_its_mean_exactly():
    mean = draw(VECTORS, WIDTH)
    unit_weight = torch.ones(1, dtype=torch.float64)
    out = solve_kronecker_mean([mean], [positive(VECTORS, 1)], [positive(WIDTH, 2)], unit_weight, mean, 50)
    assert torch.equal(out, mean)


def test_blending_solves_the_sum_of_kronecker_systems():
    means = [draw(VECTORS, WIDTH, seed=k) for k in range(3)]
    row_curvatures = [positive(VECTORS, 10 + k) for k in range(3)]
    right = [positive(WIDTH, 20 + k) for k in range(3)]
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    system = sum(w * torch.kron(a, b) for w, a, b in zip(weights, row_curvatures, right, strict=True))
    expected = sum(
        w * torch.kron(a, b) @ m.reshape(-1) for w, a, m, b in zip(weights, row_curvatures, means, right, strict=True)
    )
    exact = torch.linalg.solve(system, expected).reshape(VECTORS, WIDTH)
    out = solve_kronecker_mean(means, row_curvatures, right, weights, sum(means) / 3, 60)
    assert torch.allclose(out, exact, atol=1e-9)


def test_without_any_curvature_the_blend_stays_at_its_start():
    means = [draw(VECTORS, WIDTH, seed=k) for k in range(2)]
    none = [torch.zeros(VECTORS, VECTORS, dtype=torch.float64)] * 2
    right = [positive(WIDTH, k) for k in range(2)]
    weights = torch.full((2,), 0.5, dtype=torch.float64)
    start = (means[0] + means[1]) / 2
    assert torch.equal(solve_kronecker_mean(means, none, right, weights, start, 20), start)


def test_mode_of_one_gaussian_is_its_mean():
    mean, precision = draw(1, 1, 7), draw(1, 1, 7, seed=1).abs() + 10
    out = find_mode(mean, precision, 10.0, torch.zeros(7, dtype=torch.float64), 1)
    assert torch.allclose(out, mean[0, 0], atol=1e-12)


def test_mode_of_gaussians_divides_the_doubled_prior_out():
    """Two clients that saw the curvature H around m, both with the prior: one posterior of 2H."""
    precisions, prior = draw(7).abs() + 1, 10.0
    best = draw(7, seed=2)  # where each client's likelihood alone is highest
    precision = precisions + prior
    mean = precisions * best / precision
    out = find_mode(mean.expand(2, 1, 7), precision.expand(2, 1, 7), prior, mean, 1)
    assert torch.allclose(out, 2 * precisions * best / (2 * precisions + prior), atol=1e-12)


def test_every_step_towards_the_mode_raises_the_density():
    means, precisions, prior = draw(3, 2, 4), draw(3, 2, 4, seed=1).abs() + 1.0, 1.0

    def density(theta):
        part = 0.5 * (precisions.log() - precisions * (theta - means) ** 2).sum(dim=-1)
        return (part.logsumexp(dim=1).sum() + prior * (theta**2).sum()).item()

    start = means.median(dim=0).values[0]
    values = [density(find_mode(means, precisions, prior, start, k)) for k in range(30)]
    assert all(b >= a - 1e-9 for a, b in pairwise(values))
    assert values[-1] - values[0] > 0.01
    assert values[-1] == pytest.approx(values[-2], abs=1e-6)
