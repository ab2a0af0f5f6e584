"""Estimate the Fisher information of prompts, and combine clients' posteriors by it.

The Fisher information of a softmax classifier is J' (diag(p) - pp') J summed over samples, with J the derivative of the
logits. Its factor (diag(√p) - p√p') times random signs, pulled back through the text tower, is one vector whose outer
product is the Fisher information in expectation over the signs: one backward pass for a minibatch, where the exact sum
needs one per sample and class.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp


def sample_fisher(
    features: Callable[[Tensor], Tensor], context: Tensor, x: Tensor, real: Tensor, scale: float, signs: Tensor
) -> Tensor:
    """Return one sample, shaped like `context`, for logits scale * x @ features(context).mT.

    `signs` (samples, classes) are independent, of mean 0 and variance 1.
    """
    pulled: Any = vjp(features, context)
    table, pull_back = pulled
    p = (scale * x @ table.mT).softmax(dim=-1)  # (samples, classes)
    signed = torch.where(real[:, None], p.sqrt() * signs, 0.0)
    error = signed - p * signed.sum(dim=-1, keepdim=True)
    sample: Tensor = pull_back(scale * error.mT @ torch.where(real[:, None], x, 0.0))[0]
    return sample


def solve_kronecker_mean(
    means: Sequence[Tensor],
    row_curvatures: Sequence[Tensor],
    column_curvatures: Sequence[Tensor],
    weights: Tensor,
    start: Tensor,
    iterations: int,
) -> Tensor:
    """Return X with Σ w L X R = Σ w L M R, by that many steps of conjugate gradients from `start`.

    It minimises the sum of the clients' quadratic losses around their means M, whose curvatures are Kronecker products
    of the symmetric, non-negative L and R.
    """

    def apply(matrices: Sequence[Tensor]) -> Tensor:
        parts = zip(weights, row_curvatures, matrices, column_curvatures, strict=True)
        return torch.stack([w * a @ m @ b for w, a, m, b in parts]).sum(dim=0)

    x = start
    residual = apply([mean - x for mean in means])
    direction, size = residual, (residual**2).sum()
    floor = size * 1e-30
    for _ in range(iterations):
        image = apply([direction] * len(means))
        live = size > floor
        step = torch.where(live, size / (direction * image).sum(), 0.0)
        x = x + torch.where(live, step * direction, 0.0)
        residual = residual - torch.where(live, step * image, 0.0)
        before, size = size, (residual**2).sum()
        direction = residual + torch.where(live, size / before, 0.0) * direction
    return x


def find_mode(means: Tensor, precisions: Tensor, prior: float, start: Tensor, iterations: int) -> Tensor:
    """Return a mode of the product of the clients' posteriors, each a mixture of Gaussians.

    `means` and `precisions` are (clients, components, numbers). Every posterior includes the prior N(0, 1/prior), so
    all but one are divided out. Each step solves exactly for the mode with fixed responsibilities, which never lowers
    the density.
    """
    clients = means.shape[0]
    constant = 0.5 * precisions.log().sum(dim=-1)
    theta = start  # (numbers,)
    for _ in range(iterations):
        density = constant - 0.5 * (precisions * (theta - means) ** 2).sum(dim=-1)
        pull = density.softmax(dim=1)[..., None] * precisions
        theta = (pull * means).sum(dim=(0, 1)) / (pull.sum(dim=(0, 1)) - (clients - 1) * prior)
    return theta
