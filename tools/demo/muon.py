"""Muon: momentum whose update is made orthogonal, for the square-ish matrices of the layers."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Muon:
    """In single precision: the usual half-precision form is slow on processors without it."""

    def __init__(self, params: Sequence[nn.Parameter], decay: float) -> None:
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for p in params:
            shapes[tuple(p.shape)].append(p)
        self.stacks = list(shapes.values())
        self.momenta = [torch.zeros(len(s), *s[0].shape) for s in self.stacks]
        self.decay = decay

    def zero_grad(self) -> None:
        for params in self.stacks:
            for p in params:
                p.grad = None

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for params, momentum in zip(self.stacks, self.momenta, strict=True):
            gradient = torch.stack([p.grad for p in params if p.grad is not None])
            momentum.mul_(0.95).add_(gradient)
            update = orthogonal(gradient + 0.95 * momentum)
            scale = max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            for p, change in zip(params, update, strict=True):
                p.mul_(1 - rate * self.decay).add_(change, alpha=-rate * scale)


def orthogonal(update: Tensor) -> Tensor:
    """(matrices, rows, columns) towards the nearest orthogonal matrices, by Newton-Schulz."""
    tall = update.shape[1] > update.shape[2]
    x: Tensor = update.mT if tall else update
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-9)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
