"""The pieces of adversarial training: gradient reversal and BatchNorm over real rows only."""

from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-5  # BatchNorm's guard against a variance of zero
FRESH = 0.1  # the weight of a minibatch in the running statistics


def reverse(x: Tensor) -> Tensor:
    """x itself, whose gradient comes back with the opposite sign."""
    return 2 * x.detach() - x


class Statistics(NamedTuple):
    """What BatchNorm remembers for rows that come alone."""

    mean: Tensor  # (width,)
    variance: Tensor  # (width,)


def normalise(x: Tensor, weight: Tensor, bias: Tensor, by: Statistics) -> Tensor:
    """BatchNorm by given statistics; a row's result depends on no other row."""
    return (x - by.mean) * (torch.rsqrt(by.variance + EPSILON) * weight) + bias


def batch_norm(
    x: Tensor, real: Tensor, weight: Tensor, bias: Tensor, running: Statistics
) -> tuple[Tensor, Statistics]:
    """BatchNorm of a minibatch and the new running statistics; padded rows have no say.

    A single real row has no variance: it is normalised by the running statistics, and leaves them
    as they are.
    """
    count = real.sum()
    enough = count > 1
    share = real.to(x.dtype)[:, None] / count.clamp(min=1)
    mean = (share * x).sum(0)
    variance = (share * (x - mean).square()).sum(0)
    now = Statistics(
        torch.where(enough, mean, running.mean), torch.where(enough, variance, running.variance)
    )
    unbiased = variance.detach() * count / (count - 1).clamp(min=1)
    new = Statistics(
        torch.where(enough, torch.lerp(running.mean, mean.detach(), FRESH), running.mean),
        torch.where(enough, torch.lerp(running.variance, unbiased, FRESH), running.variance),
    )
    return normalise(x, weight, bias, now), new
