"""Classifiers mixed by weights on their logits, chosen by likelihood: linear ones stay linear."""

import torch
from torch import Tensor

from fedvlm.maths.probe import losses

STEPS = 25
LONGEST = 1.0  # of a step in log weight
BELIEF = 1.0  # deviation of a log weight around where it starts, so few rows move it little
HEAT = 2.0  # the same for one classifier's temperature


def blend(logits: Tensor, y: Tensor, start: Tensor, belief: float = BELIEF) -> Tensor:
    """(many,) log weights of (many, rows, classes) at which their sum explains y best.

    The objective is the rows' cross-entropy plus |u - start|² / 2 belief²: without rows (y = -1)
    it is the start. Gauss-Newton, a fixed number of short steps.
    """
    real = (y >= 0).to(logits.dtype)
    index = y.clamp(min=0).expand(logits.shape[:-1])[..., None]
    meant = logits.gather(-1, index)[..., 0]
    eye = torch.eye(len(start), dtype=logits.dtype, device=logits.device)
    u = start
    for _ in range(STEPS):
        weight = u.exp()
        p = (weight[:, None, None] * logits).sum(0).softmax(-1)
        mean = (p * logits).sum(-1)
        pull = weight * ((mean - meant) * real).sum(-1)
        apart = (logits - mean[..., None]) * (p.sqrt() * real[:, None])
        flat = weight[:, None] * apart.flatten(1)
        curve = flat @ flat.mT + eye * (pull.clamp(min=0) + belief**-2)
        step = torch.linalg.solve(curve, pull + (u - start) * belief**-2)
        u = u - step.clamp(-LONGEST, LONGEST)
    return u


def heat(logits: Tensor, y: Tensor) -> Tensor:
    """log of what one classifier's logits are to be multiplied by; 0 without rows."""
    return blend(logits[None], y, logits.new_zeros(1), HEAT)[0]


def averaged(logits: Tensor, y: Tensor) -> Tensor:
    """(many,) weights of classifiers of one family: each at its temperature, by its likelihood.

    With many rows the best one gets nearly all; with few they share, which is the margin.
    """
    heats = torch.stack([heat(one, y) for one in logits])
    found = losses(heats.exp()[:, None, None] * logits, y)
    return (-found).softmax(0) * heats.exp()
