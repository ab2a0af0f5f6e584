"""The steps of a logistic regression over clients, from gradients at several points."""

import pytest
import torch

from fedvlm.maths.logistic_regression import (
    BIAS_RIDGE,
    Evaluations,
    Head,
    loss_and_gradient,
    multisecant_step,
    split_head,
)
from fedvlm.maths.ridge_regression import Statistics, solve_path


def samples(n_samples=200, dim=6, classes=3):
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (n_samples,), generator=draw)
    centres = 2 * torch.randn(classes, dim, generator=draw, dtype=torch.float64)
    return centres[y] + torch.randn(n_samples, dim, generator=draw, dtype=torch.float64), y


def bordered(x):
    return torch.cat([x, torch.ones_like(x[:, :1])], dim=1)


def evaluate(x, y, points):
    values = [loss_and_gradient(split_head(point), x, y) for point in points]
    losses, gradients = (torch.stack(part) / len(y) for part in zip(*values, strict=True))
    return Evaluations(torch.stack(list(points)), gradients, losses, losses)


def joined(known, new):
    return Evaluations(*(torch.cat(pair) for pair in zip(known, new, strict=True)))


def test_from_zero_the_first_step_is_ridge_regression():
    x, y = samples()
    counts = torch.bincount(y).double()
    sums = torch.stack([x[y == label].sum(0) for label in range(3)])
    gram, ridge = bordered(x).mT @ bordered(x) / len(y), 1e-2
    anchor = torch.zeros(3, 7, dtype=torch.float64)
    step = split_head(multisecant_step(evaluate(x, y, [anchor]), gram, anchor, ridge / 3, 1 / 3))
    expected = solve_path(Statistics(counts, sums, x.mT @ x), None).head(ridge)
    centred = 3 * (expected.weight - expected.weight.mean(0))
    assert torch.allclose(step.weight - step.weight.mean(0), centred, atol=1e-6)


def quadratic(points, hessian, minimum):
    """A quadratic function as evaluations."""
    gradients = (points - minimum).flatten(1) @ hessian
    losses = ((points - minimum).flatten(1) * gradients).sum(1) / 2
    return Evaluations(points, gradients.view_as(points), losses, losses)


def test_gradients_that_span_the_space_give_the_minimum_of_a_quadratic_at_once():
    draw = torch.Generator().manual_seed(1)
    root = torch.randn(8, 8, generator=draw, dtype=torch.float64)
    hessian, minimum = root @ root.mT + torch.eye(8), torch.randn(1, 2, 4, generator=draw, dtype=torch.float64)
    points = torch.randn(9, 2, 4, generator=draw, dtype=torch.float64)
    known = quadratic(points, hessian, minimum)
    found = multisecant_step(known, torch.eye(4, dtype=torch.float64), torch.zeros(2, 4).double(), 1e-12, 0.25)
    assert torch.allclose(found, minimum[0], atol=1e-4)
    order = torch.randperm(9, generator=draw)
    again = multisecant_step(
        Evaluations(*(part[order] for part in known)), torch.eye(4).double(), torch.zeros(2, 4).double(), 1e-12, 0.25
    )
    assert torch.allclose(found, again, atol=1e-6)


@pytest.mark.parametrize("ridge", [1e-2, 1e-3])
def test_steps_lead_to_the_solution_of_the_regression(ridge):
    x, y = samples()
    gram, anchor = bordered(x).mT @ bordered(x) / len(y), torch.zeros(3, 7, dtype=torch.float64)
    known = evaluate(x, y, [anchor])
    for _ in range(12):
        known = joined(known, evaluate(x, y, [multisecant_step(known, gram, anchor, ridge, 0.25)]))
    ridges = torch.full((7,), ridge, dtype=torch.float64)
    ridges[-1] = BIAS_RIDGE
    gradients = known.gradients + ridges * (known.points - anchor)
    sizes = gradients.abs().amax((1, 2))
    assert (sizes.diff() < 0).all() and sizes[-1] < 0.02 * sizes[0]


def test_equal_points_count_once():
    x, y = samples()
    gram, anchor = bordered(x).mT @ bordered(x) / len(y), torch.zeros(3, 7, dtype=torch.float64)
    one, two = evaluate(x, y, [anchor]), evaluate(x, y, [anchor, anchor])
    assert torch.allclose(*(multisecant_step(known, gram, anchor, 1e-3, 0.25) for known in (one, two)))


def test_a_head_is_the_joined_one():
    head = Head(torch.randn(3, 6), torch.randn(3))
    assert all(torch.equal(a, b) for a, b in zip(head, split_head(head.joined()), strict=True))
