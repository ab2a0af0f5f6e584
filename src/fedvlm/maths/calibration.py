"""Temperatures that make a classifier as sure as it is right, and two classifiers mixed by them."""

from math import log

import torch
from torch import Tensor

COLDEST, HOTTEST = log(1e-2), log(1e3)  # of log τ
HALVINGS = 12  # of that range: to 3e-3
POLISHINGS = 2  # to the square of it, and again


def heat(logits: Tensor, y: Tensor) -> Tensor:
    """log τ at which the mean confidence of softmax(logits/τ) is the accuracy; 0 without rows.

    One for every classifier of (..., rows, classes). Rows of y = -1 are padding. The accuracy is
    kept off chance and, for n rows, below 1 - 1/(2n), because no finite temperature is as sure as
    a perfect score.
    """
    real = y >= 0
    rows = real.sum().clamp(min=1)
    best, guess = logits.max(-1)
    hits = ((guess == y) & real).sum(-1)
    chance = 1 / logits.shape[-1]
    accuracy = torch.minimum(hits / rows, 1 - 0.5 / rows).clamp(min=chance + 1e-3)
    share = (real / rows).to(logits.dtype)
    below = logits - best[..., None]
    found, step = torch.full_like(accuracy, (COLDEST + HOTTEST) / 2), (HOTTEST - COLDEST) / 4
    for _ in range(HALVINGS):
        parts = (below * (-found).exp()[..., None, None]).exp()
        found = found + step * ((parts.sum(-1).reciprocal() @ share) - accuracy).sign()
        step /= 2
    for _ in range(POLISHINGS):  # by Newton, never farther than the interval that is left
        scaled = below * (-found).exp()[..., None, None]
        parts = scaled.exp()
        sure = parts.sum(-1).reciprocal()
        slope = (sure.square() * (parts * scaled).sum(-1)) @ share
        off = (sure @ share - accuracy) / -slope.clamp(max=-1e-20)
        found = (found + off.clamp(-4 * step, 4 * step)).clamp(COLDEST, HOTTEST)
    return torch.where(real.any(), found, 0.0)


def fuse(first: Tensor, second: Tensor) -> Tensor:
    """log of η p + (1 - η) q with η = a/(a + b), where a and b are the two largest probabilities.

    Takes calibrated logits (rows, classes); what comes out are log-probabilities.
    """
    p, q = first.log_softmax(1), second.log_softmax(1)
    odds = p.amax(1, keepdim=True) - q.amax(1, keepdim=True)  # log a/b
    sigmoid = torch.nn.functional.logsigmoid
    return torch.logaddexp(sigmoid(odds) + p, sigmoid(-odds) + q)


def both(first: Tensor, second: Tensor, heats: Tensor | None) -> Tensor:
    """Two classifiers' logits as one: fused at their temperatures (log τ), or averaged without."""
    if heats is None:
        return average(first, second)
    return fuse(first / heats[0].exp(), second / heats[1].exp())


def average(first: Tensor, second: Tensor) -> Tensor:
    """log of (p + q)/2."""
    return torch.logaddexp(first.log_softmax(1), second.log_softmax(1)) - log(2)


def without_bias(weight: Tensor, bias: Tensor, means: Tensor, there: Tensor) -> Tensor:
    """(classes, dim): a linear classifier of rows that share a mean, as sure as a head should be.

    A bias b_c becomes b_c (μ·x)/|μ|², which is b_c but for the rows' spread around the mean μ of
    the class means. The temperature is that of the class means, each a row of its class.
    """
    centre = means.sum(0) / there.sum().clamp(min=1)
    lift = centre / centre.square().sum().clamp(min=1e-9)
    out = weight + torch.where(there, bias, 0.0)[:, None] * lift
    y = torch.where(there, torch.arange(len(means), device=means.device), -1)
    return out / heat(means @ out.mT, y).exp()
