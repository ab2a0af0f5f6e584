"""The server's part of a logistic regression over clients: quasi-Newton steps from summed slopes.

Points are (classes, dim + 1), the last column the bias. Slopes are of the rows' mean cross-entropy
alone; the ridge is added here, so that it may change from step to step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.maths.probe import BIAS_RIDGE, CURVATURE_BOUND, lbfgs_direction

QUASI_NEWTON_MEMORY = 8
SHRINK_FACTOR, GROWTH_FACTOR = 0.25, 2.0  # of the reach, after a step that failed and one that did not


class QuasiNewtonState(NamedTuple):
    point: Tensor  # where the clients are asked next
    base: Tensor  # the best point so far,
    gradient: Tensor  # its slope
    loss: Tensor  # and its loss, infinite before the first
    step_fraction: Tensor  # share of a whole step that is taken
    steps: Tensor  # (MEMORY, ...) between points, zero where there was none
    gradient_changes: Tensor  # (MEMORY, ...) what the slope changed by


def start_state(point: Tensor) -> QuasiNewtonState:
    point, none = point.double(), torch.zeros(QUASI_NEWTON_MEMORY, *point.shape, dtype=torch.float64)
    unit = torch.ones((), dtype=torch.float64)
    return QuasiNewtonState(point, point, torch.zeros_like(point), unit * torch.inf, unit, none, none)


def take_quasi_newton_step(
    state: QuasiNewtonState, loss: Tensor, gradient: Tensor, gram: Tensor, anchor: Tensor, ridge: float
) -> QuasiNewtonState:
    """One step, from the mean loss and slope at `walk.point`; `gram` is the mean of x xᵀ, bordered.

    A point that is worse than the base is not kept, but what it says of the curvature is.
    """
    ridge_weights = torch.full_like(gram[0], ridge)
    ridge_weights[-1] = BIAS_RIDGE
    root = _root(CURVATURE_BOUND * gram.double(), ridge_weights)

    def objective(loss: Tensor, at: Tensor) -> Tensor:
        return loss + (ridge_weights * (at - anchor).square()).sum() / 2

    step, gradient_change = state.point - state.base, gradient - state.gradient
    steps = torch.cat([state.steps[1:], step[None]])
    gradient_changes = torch.cat([state.gradient_changes[1:], gradient_change[None]])
    better = objective(loss, state.point) <= objective(state.loss, state.base)
    base, gradient = torch.where(better, state.point, state.base), torch.where(better, gradient, state.gradient)
    step_fraction = torch.where(
        better, (state.step_fraction * GROWTH_FACTOR).clamp(max=1.0), state.step_fraction * SHRINK_FACTOR
    )
    history = [(s, t + ridge_weights * s) for s, t in zip(steps, gradient_changes, strict=True)]
    objective_gradient = gradient + ridge_weights * (base - anchor)
    direction = lbfgs_direction(objective_gradient, history, lambda q: torch.cholesky_solve(q.mT, root).mT)
    point = (base - step_fraction * direction).float().double()  # as it is sent
    return QuasiNewtonState(
        point, base, gradient, torch.where(better, loss, state.loss), step_fraction, steps, gradient_changes
    )


def _root(curvature: Tensor, ridge_weights: Tensor) -> Tensor:
    """Of their sum; of a `bend` that is no sum of squares (a lie, or numbers' medians) without
    what makes it none, so that the step stays one that goes down."""
    jitter = 1e-12 * (curvature.diagonal() + ridge_weights).abs().mean() * torch.eye(len(curvature))
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(curvature + ridge_weights.diag() + jitter)
    if int(failed):
        values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
        curvature = (vectors * values.clamp(min=0)) @ vectors.mT
        jitter = 1e-12 * (curvature.diagonal() + ridge_weights).mean() * torch.eye(len(curvature))
        root = torch.linalg.cholesky((curvature + curvature.mT) / 2 + ridge_weights.diag() + jitter)
    return root
