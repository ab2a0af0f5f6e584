"""Multinomial logistic regression with a ridge towards an anchor: one client's, and a federation's.

The objective is the mean cross-entropy of the rows plus ridge/2 · |W - W_anchor|²; the bias has no
ridge to speak of. Iterations are fixed and a fit that has arrived stays where it is, so engines may
vmap it. With C = 1/(rows · ridge) it is scikit-learn's LogisticRegression.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

RIDGES = tuple(10.0**-k for k in range(1, 8))  # from hardly moving to nearly separating
USUAL = 1e-4  # without validation rows
BIAS = 1e-9  # ridge of the bias: only so that a class nobody has rows of does not run away
STEPS = 60
MEMORY = 10  # steps that the curvature is estimated from
BEND = 0.25  # of a row's loss in the metric: half of the bound 1/2, as most rows are far from it
STILL = 1e-10  # slope at which a fit has arrived


class Head(NamedTuple):
    weight: Tensor  # (..., classes, dim)
    bias: Tensor  # (..., classes)

    def logits(self, x: Tensor) -> Tensor:
        """(..., rows, classes)"""
        return x @ self.weight.mT + self.bias[..., None, :]

    def joined(self) -> Tensor:
        """(..., classes, dim + 1): the bias as the weight of a coordinate that is 1."""
        return torch.cat([self.weight, self.bias[..., None]], dim=-1)


def split(joined: Tensor) -> Head:
    return Head(joined[..., :-1], joined[..., -1])


class Path(NamedTuple):
    """One head per ridge."""

    heads: Head
    slope: Tensor  # (ridges,) largest slope that is left


def fit(
    x: Tensor, y: Tensor, ridges: Tensor, anchor: Head, open: Tensor, steps: int = STEPS
) -> Path:
    """Heads over the classes that are `open`; the others keep the anchor's row. y = -1 is no row.

    W - W_anchor lies in the span of the rows, so it is sought in their singular basis, in which
    the metric bend · S² / n + ridge is diagonal for every ridge at once.
    """
    real = y >= 0
    x = torch.where(real[:, None], x.double(), 0.0)
    label = y.clamp(min=0)
    share = real.double() / real.sum().clamp(min=1)
    left, size, right = torch.linalg.svd(x, full_matrices=False)
    rows = torch.cat([left * size, torch.ones_like(x[:, :1])], dim=1)  # (rows, rank + 1)
    pull = torch.cat(
        [ridges.double()[:, None].expand(-1, len(size)), ridges[:, None] * 0 + BIAS], 1
    )
    bend = torch.cat([BEND * size.square() / real.sum().clamp(min=1), size.new_full((1,), BEND)])
    scale = (bend + pull).rsqrt()[:, :, None]  # (ridges, rank + 1, 1)
    pull = pull[:, :, None] * scale.square()
    truth = (label[:, None] == torch.arange(len(open), device=y.device)).double()
    shut = torch.where(open, 0.0, -torch.inf)
    start = (anchor.logits(x.to(anchor.weight.dtype)).double() + shut).expand(len(ridges), -1, -1)

    def slope(logits: Tensor, at: Tensor) -> Tensor:
        wrong = (logits.softmax(-1) - truth) * share[:, None]
        return scale * side_by_side(rows.mT, wrong) + pull * at

    at = torch.zeros(len(ridges), rows.shape[1], len(open), dtype=x.dtype, device=x.device)
    logits, down = start, slope(start, at)
    past: list[tuple[Tensor, Tensor]] = []
    for _ in range(steps):
        way = -turned(down, past, lambda q: q)
        ahead = side_by_side(rows, scale * way)
        length = along(logits, ahead, truth, share, pull, at, way)
        still = down.abs().amax((1, 2)) < STILL
        step = torch.where(still[:, None, None], 0.0, length[:, None, None] * way)
        at, logits = (
            at + step,
            logits + torch.where(still[:, None, None], 0.0, length[:, None, None] * ahead),
        )
        after = slope(logits, at)
        past = [*past, (step, after - down)][-MEMORY:]
        down = after
    found = scale * at
    weight = anchor.weight + (right.mT @ found[:, :-1]).mT
    return Path(Head(weight, anchor.bias + found[:, -1]), down.abs().amax((1, 2)))


def side_by_side(left: Tensor, many: Tensor) -> Tensor:
    """left @ one, for each of many: as one product, since narrow ones are slow."""
    wide = left @ many.transpose(0, 1).flatten(1)
    return wide.reshape(len(left), len(many), -1).transpose(0, 1)


def turned(
    slope: Tensor, past: list[tuple[Tensor, Tensor]], metric: Callable[[Tensor], Tensor]
) -> Tensor:
    """The slope through the inverse curvature that past steps and turns show (L-BFGS).

    `metric` is the inverse curvature known beforehand. A pair without curvature does not count.
    """
    taken = []
    for step, turn in reversed(past):
        inner = dot(step, turn)
        rate = torch.where(inner > 1e-30, 1 / inner.clamp(min=1e-30), 0.0)
        share = rate * dot(step, slope)
        slope = slope - share * turn
        taken.append((step, turn, rate, share, inner))
    slope, gain = metric(slope), torch.ones_like(dot(slope, slope))
    for _, turn, rate, _, inner in taken:  # from the latest: the first that counts says how long
        fresh = (gain == 1.0) & (rate > 0)
        gain = torch.where(fresh, inner / dot(turn, metric(turn)).clamp(min=1e-30), gain)
    slope = gain * slope
    for step, turn, rate, share, _ in reversed(taken):
        slope = slope + (share - rate * dot(turn, slope)) * step
    return slope


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1), keepdim=True)


def along(
    logits: Tensor,
    ahead: Tensor,
    truth: Tensor,
    share: Tensor,
    pull: Tensor,
    at: Tensor,
    way: Tensor,
    tries: int = 4,
) -> Tensor:
    """(ridges,) how far along `way` the objective is least.

    It is convex there: Newton, and halves or doubles where that leaves what is known to hold the
    minimum.
    """
    curve, begin = (pull * way * way).sum((1, 2)), (pull * way * at).sum((1, 2))
    meant = (truth * ahead).sum(-1)
    length = torch.ones_like(curve)
    low, high = torch.zeros_like(curve), torch.full_like(curve, torch.inf)
    for _ in range(tries):
        p = (logits + length[:, None, None] * ahead).softmax(-1)
        mean = (p * ahead).sum(-1)
        first = ((mean - meant) * share).sum(-1) + begin + length * curve
        spread = (p * ahead.square()).sum(-1) - mean.square()
        second = (spread * share).sum(-1) + curve
        low, high = torch.where(first < 0, length, low), torch.where(first < 0, high, length)
        middle = torch.where(high.isinf(), 4 * length, (low + high) / 2)
        after = length - first / second.clamp(min=1e-30)
        most = torch.minimum(high, 16 * length.clamp(min=1))
        length = torch.where((after > low) & (after < most), after, middle)
    return length


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """(...,) summed cross-entropy of (..., rows, classes); rows of y = -1 count nothing."""
    said = logits.log_softmax(-1)
    index = y.clamp(min=0).expand(said.shape[:-1])[..., None]
    return torch.where(y >= 0, -said.gather(-1, index)[..., 0], 0.0).sum(-1)


def pull_of(head: Head, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over rows, so clients' add up: the cross-entropy, and its slope (classes, dim + 1)."""
    real = (y >= 0)[:, None]
    x = torch.where(real, x, 0.0)
    logits = head.logits(x)
    truth = (y[:, None] == torch.arange(logits.shape[1], device=y.device)).to(x.dtype)
    wrong = torch.where(real, logits.softmax(-1) - truth, 0.0)
    whole = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    return losses(logits, y), wrong.mT @ whole


def chosen(path: Path, ridges: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Which ridge: by the likelihood of validation rows, with USUAL as a belief of a few rows."""
    away = (ridges / USUAL).log10()
    return (losses(path.heads.logits(x.double()), y) + away.square() / 8).argmin()
