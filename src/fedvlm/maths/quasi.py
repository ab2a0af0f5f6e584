"""The server's part of a logistic regression over clients: quasi-Newton steps from summed slopes.

Points are (classes, dim + 1), the last column the bias. Slopes are of the rows' mean cross-entropy
alone; the ridge is added here, so that it may change from step to step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.maths.probe import BEND, BIAS, turned

MEMORY = 8
SHORTER, LONGER = 0.25, 2.0  # of the reach, after a step that failed and one that did not


class Walk(NamedTuple):
    point: Tensor  # where the clients are asked next
    base: Tensor  # the best point so far,
    slope: Tensor  # its slope
    loss: Tensor  # and its loss, infinite before the first
    reach: Tensor  # share of a whole step that is taken
    steps: Tensor  # (MEMORY, ...) between points, zero where there was none
    turns: Tensor  # (MEMORY, ...) what the slope changed by


def begin(point: Tensor) -> Walk:
    point, none = point.double(), torch.zeros(MEMORY, *point.shape, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    return Walk(point, point, torch.zeros_like(point), one * torch.inf, one, none, none)


def advance(
    walk: Walk, loss: Tensor, slope: Tensor, gram: Tensor, anchor: Tensor, ridge: float
) -> Walk:
    """One step, from the mean loss and slope at `walk.point`; `gram` is the mean of x xᵀ, bordered.

    A point that is worse than the base is not kept, but what it says of the curvature is.
    """
    pull = torch.full_like(gram[0], ridge)
    pull[-1] = BIAS
    root = _root(BEND * gram.double(), pull)

    def objective(loss: Tensor, at: Tensor) -> Tensor:
        return loss + (pull * (at - anchor).square()).sum() / 2

    step, turn = walk.point - walk.base, slope - walk.slope
    steps = torch.cat([walk.steps[1:], step[None]])
    turns = torch.cat([walk.turns[1:], turn[None]])
    better = objective(loss, walk.point) <= objective(walk.loss, walk.base)
    base, slope = torch.where(better, walk.point, walk.base), torch.where(better, slope, walk.slope)
    reach = torch.where(better, (walk.reach * LONGER).clamp(max=1.0), walk.reach * SHORTER)
    past = [(s, t + pull * s) for s, t in zip(steps, turns, strict=True)]
    down = slope + pull * (base - anchor)
    way = turned(down, past, lambda q: torch.cholesky_solve(q.mT, root).mT)
    point = (base - reach * way).float().double()  # as it is sent
    return Walk(point, base, slope, torch.where(better, loss, walk.loss), reach, steps, turns)


def _root(bend: Tensor, pull: Tensor) -> Tensor:
    """Of their sum; of a `bend` that is no sum of squares (a lie, or numbers' medians) without
    what makes it none, so that the step stays one that goes down."""
    least = 1e-12 * (bend.diagonal() + pull).abs().mean() * torch.eye(len(bend))
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(bend + pull.diag() + least)
    if int(failed):
        values, vectors = torch.linalg.eigh((bend + bend.mT) / 2)
        bend = (vectors * values.clamp(min=0)) @ vectors.mT
        least = 1e-12 * (bend.diagonal() + pull).mean() * torch.eye(len(bend))
        root = torch.linalg.cholesky((bend + bend.mT) / 2 + pull.diag() + least)
    return root
