"""The pieces of adversarial training: gradient reversal and BatchNorm over real rows only."""

from typing import NamedTuple

import torch
from torch import Tensor

BATCH_NORM_EPSILON = 1e-5  # BatchNorm's guard against a variance of zero
BATCH_NORM_MOMENTUM = 0.1  # the weight of a minibatch in the running statistics


def reverse_gradient(x: Tensor) -> Tensor:
    """x itself, whose gradient comes back with the opposite sign."""
    return 2 * x.detach() - x


class Statistics(NamedTuple):
    """What BatchNorm remembers for rows that come alone."""

    mean: Tensor  # (width,)
    variance: Tensor  # (width,)


def normalise(x: Tensor, weight: Tensor, bias: Tensor, by: Statistics) -> Tensor:
    """BatchNorm by given statistics; a row's result depends on no other row."""
    return (x - by.mean) * (torch.rsqrt(by.variance + BATCH_NORM_EPSILON) * weight) + bias


def batch_norm(x: Tensor, real: Tensor, weight: Tensor, bias: Tensor, running: Statistics) -> tuple[Tensor, Statistics]:
    """BatchNorm of a minibatch and the new running statistics; padded rows have no say.

    A single real row has no variance: it is normalised by the running statistics, and leaves them
    as they are.
    """
    weights = real.to(x.dtype)
    count = weights.sum()
    has_variance, n_real = count > 1, count.clamp(min=1)
    sample_weights = weights / n_real
    mean = torch.where(has_variance, sample_weights @ x, running.mean)
    centred = x - mean
    variance = torch.where(has_variance, sample_weights @ centred.square(), running.variance)
    out = centred * (torch.rsqrt(variance + BATCH_NORM_EPSILON) * weight) + bias
    unbiased = variance.detach() * (n_real / (count - 1).clamp(min=1))
    # Without enough rows both ends are the same, and nothing moves.
    new = Statistics(
        torch.lerp(running.mean, mean.detach(), BATCH_NORM_MOMENTUM),
        torch.lerp(running.variance, unbiased, BATCH_NORM_MOMENTUM),
    )
    return out, new
