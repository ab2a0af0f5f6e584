"""Per-row gradients that are clipped, summed and blurred, and low-rank carriers for them."""

import torch
from torch import Tensor

from fedvlm.core import Tensors
from fedvlm.maths.noise import cover


def clipped_sum(each: Tensors, clip: float, real: Tensor) -> Tensors:
    """The sum over rows of gradients (rows, ...) that together are at most `clip` long per row."""
    squares = [value.flatten(1).square().sum(1) for value in each.values()]
    length = torch.stack(squares).sum(0).sqrt()
    share = torch.where(real, (clip / length.clamp(min=1e-30)).clamp(max=1.0), 0.0)
    return {key: torch.tensordot(share, value, dims=1) for key, value in each.items()}


def blurred(total: Tensors, deviation: float, noise: Tensor) -> Tensors:
    """Adds normal noise of this deviation to every number; `noise` is flat and standard normal."""
    parts = torch.split(noise, [value.numel() for value in total.values()])
    return {
        key: cover(value, deviation, part.view(value.shape))
        for (key, value), part in zip(total.items(), parts, strict=True)
    }


def factors(matrix: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, rank) with orthonormal columns and (rank, columns) with orthonormal rows.

    One power iteration from `draw` (columns, rank) towards the matrix's leading directions.
    """
    left, _ = torch.linalg.qr(matrix @ draw)
    right, _ = torch.linalg.qr(matrix.mT @ left)
    return left, right.mT


def carried(left: Tensor, right: Tensor, by_left: Tensor, by_right: Tensor) -> Tensor:
    """A gradient of the whole matrix from those of its two orthonormal factors.

    It is the gradient's projection on the matrices that share columns with `left` or rows with
    `right`; the last term takes away what both would count (Yu et al., Large scale private learning
    via low-rank reparametrization, ICML 2021).
    """
    return by_left @ right + left @ by_right - left @ (left.mT @ by_left) @ right
