"""What noise buys, by the `dp-accounting` library, and what a client keeps to itself."""

import math
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlm.core import Tensors
from fedvlm.errors import SettingsError

# Whole orders only: fractional ones do not always converge, and say so on the terminal.
ORDERS = (*range(2, 65), *(2**k for k in range(7, 15)))


def spent(noise_multiplier: float, releases: int, delta: float) -> dict[str, float]:
    """For the record of a client: ε and δ of so many releases; nothing where there is no noise."""
    if not noise_multiplier:
        return {}
    return {"epsilon": epsilon(noise_multiplier, releases, delta=delta), "delta": delta}


def epsilon(noise_multiplier: float, steps: int, sampling_rate: float = 1.0, delta: float = 1e-5) -> float:
    """ε at `delta` of `steps` releases of a sum, each with noise of this multiple of the clip.

    The clip bounds what one member adds to a sum, and neighbours differ by one member more or
    less. `sampling_rate` is the chance with which each member is in a step, drawn anew and alone
    every time (Poisson); rows that are shuffled are not, and take the default 1, which assumes
    that every member is in every step. There it is the exact value, else a bound by Rényi
    divergences. Without noise it is infinite, without steps 0.
    """
    if not noise_multiplier >= 0 or steps < 0:
        raise SettingsError(
            f"a noise multiplier of {noise_multiplier} over {steps} steps has no ε; neither is negative"
        )
    if not 0 < delta < 1 or not 0 < sampling_rate <= 1:
        raise SettingsError(
            f"delta = {delta} lies between 0 and 1, and sampling_rate = {sampling_rate} is at "
            "most 1 and above 0; correct them (a usual delta is 1e-5)"
        )
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    try:
        dp: Any = import_module("dp_accounting")
        renyi: Any = import_module("dp_accounting.rdp")
    except ImportError as error:
        raise SettingsError("the privacy of noise is counted by dp-accounting; install fedvlm[privacy]") from error
    # Gaussians compose to one Gaussian whose noise is less by the root of their number.
    unsampled_epsilon = float(dp.get_epsilon_gaussian(noise_multiplier / math.sqrt(steps), delta))
    if sampling_rate == 1:
        return unsampled_epsilon
    step = dp.PoissonSampledDpEvent(sampling_rate, dp.GaussianDpEvent(noise_multiplier))
    accountant = renyi.RdpAccountant(ORDERS)
    accountant.compose(dp.SelfComposedDpEvent(step, steps))
    return min(unsampled_epsilon, float(accountant.get_epsilon(delta)))  # sampling never costs privacy


Draw = Callable[..., Tensor]  # standard normal numbers of a shape, in float64
GRID_BITS = 10  # the grid's step is a power of two, 2^-10 to 2^-11 of the noise's deviation


def secure_normal(*shape: int) -> Tensor:
    """Of the system's entropy, by Box and Muller: a radius and an angle of 64 bits make two."""
    count = math.prod(shape)
    pairs = -(-count // 2)
    bits = np.frombuffer(os.urandom(16 * pairs), np.uint64)
    radius = np.sqrt(-2.0 * np.log((bits[:pairs] + 0.5) * 2.0**-64))  # up to 9.5
    angle = bits[pairs:] * (2.0**-63 * math.pi)
    normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(normals[:count].reshape(shape))


def seeded_normal(generator: torch.Generator) -> Draw:
    """For simulations, which are to be repeated and protect nobody."""
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def grid_step(std: float) -> float:
    """Of the grid that a sum with noise of this deviation is rounded to."""
    return 2.0 ** (math.floor(math.log2(std)) - GRID_BITS)


def add_noise(value: Tensor, std: float, normal: Tensor) -> Tensor:
    """value + deviation · normal, rounded to the grid, in the type of the value."""
    if not std:
        return value
    grid = grid_step(std)
    multiples = (value.double() + std * normal.double()) / grid
    return (multiples.round() * grid).to(value.dtype)


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


def roc_auc(members: Tensor, non_members: Tensor) -> float:
    """The chance that a member scores above another row; half a chance where they tie."""
    ordered = non_members.sort().values
    below = torch.searchsorted(ordered, members) + torch.searchsorted(ordered, members, right=True)
    return (below.double().mean() / (2 * len(non_members))).item()


def roc_auc_by_class(
    members: Tensor, member_labels: Tensor, non_members: Tensor, non_member_labels: Tensor
) -> float | None:
    """`area` within each class, classes weighing as many as their pairs; None without a pair.

    Within a class, because else a score that only knows which classes are common would pass.
    """
    total = pairs = 0.0
    for label in sorted(set(member_labels.tolist())):
        class_members, class_non_members = members[member_labels == label], non_members[non_member_labels == label]
        if weight := len(class_members) * len(class_non_members):
            total += weight * roc_auc(class_members, class_non_members)
            pairs += weight
    return total / pairs if pairs else None


def mean_similarities(x: Tensor, y: Tensor, means: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Two scores of rows by an uploaded mean: likeness to it, and to what sets it apart.

    `means` and `known` (classes, dim) are the client's and what the others' uploads lead one to
    expect, zero where they say nothing. A mean of n rows leans towards each of them by 1/n, which
    shows best once the direction that all rows of the class share has been taken away.
    """
    return (x * means[y]).sum(dim=1), (x * (means - expected)[y]).sum(dim=1)
