"""Per-row gradients that are clipped, summed and blurred, and low-rank carriers for them."""

import torch
from torch import Tensor

from fedvlm.core import Tensors
from fedvlm.maths.noise import add_noise


def clipped_sum(gradients: Tensors, clip: float, real: Tensor) -> Tensors:
    """The sum over rows of gradients (rows, ...) that together are at most `clip` long per row."""
    squares = [value.flatten(1).square().sum(1) for value in gradients.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    scale = torch.where(real, (clip / norms.clamp(min=1e-30)).clamp(max=1.0), 0.0)
    return {key: torch.tensordot(scale, value, dims=1) for key, value in gradients.items()}


def add_noise_to_all(total: Tensors, std: float, noise: Tensor) -> Tensors:
    """Adds normal noise of this deviation to every number; `noise` is flat and standard normal."""
    parts = torch.split(noise, [value.numel() for value in total.values()])
    return {
        key: add_noise(value, std, part.view(value.shape))
        for (key, value), part in zip(total.items(), parts, strict=True)
    }


def orthonormal_factors(matrix: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, rank) with orthonormal columns and (rank, columns) with orthonormal rows.

    One power iteration from `draw` (columns, rank) towards the matrix's leading directions.
    """
    left_factor, _ = torch.linalg.qr(matrix @ draw)
    right_factor, _ = torch.linalg.qr(matrix.mT @ left_factor)
    return left_factor, right_factor.mT


def project_gradient(
    left_factor: Tensor, right_factor: Tensor, left_gradient: Tensor, right_gradient: Tensor
) -> Tensor:
    """A gradient of the whole matrix from those of its two orthonormal factors.

    It is the gradient's projection on the matrices that share columns with `left` or rows with
    `right`; the last term takes away what both would count (Yu et al., Large scale private learning
    via low-rank reparametrization, ICML 2021).
    """
    return (
        left_gradient @ right_factor
        + left_factor @ right_gradient
        - left_factor @ (left_factor.mT @ left_gradient) @ right_factor
    )
