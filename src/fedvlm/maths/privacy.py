"""Add noise that protects samples, count the ε that it buys, and measure membership inference.

Noise that protects somebody is drawn from the system's entropy: torch's generator takes 32 bits of its seed, so that
whoever has an upload can try them all and subtract the noise.

The low bits of a floating-point sum reveal its terms (Mironov, On significance of the least significant bits for
differential privacy, CCS 2012). So a noisy sum is computed in float64 and rounded to a grid that is far coarser than
those bits and far finer than the noise.

ε is computed by the dp-accounting library. The ROC area is our own: it takes four lines, and scikit-learn is optional.
"""

import math
import os
from collections.abc import Callable
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from fedvlm.core import Tensors
from fedvlm.core.schema import NON_NEGATIVE, OPEN_FRACTION, POSITIVE_FRACTION, Range, check_range
from fedvlm.plugins import require

# Integer orders only: fractional ones do not always converge, and print warnings.
ORDERS = (*range(2, 65), *(2**k for k in range(7, 15)))
GRID_BITS = 10  # the grid's step is a power of two, 2^-10 to 2^-11 of the noise's std
Draw = Callable[..., Tensor]  # standard normal numbers of a shape, in float64


def spent(noise_multiplier: float, releases: int, delta: float) -> dict[str, float]:
    """Return ε and δ of so many releases for the record of a client; nothing without noise."""
    if not noise_multiplier:
        return {}
    return {"epsilon": epsilon(noise_multiplier, releases, delta=delta), "delta": delta}


def epsilon(noise_multiplier: float, steps: int, sampling_rate: float = 1.0, delta: float = 1e-5) -> float:
    """Return ε at `delta` of `steps` releases of a sum, with noise whose std is this multiple of the clip.

    The clip bounds what one member adds to a sum; neighbouring data sets differ by one member. `sampling_rate` is the
    probability that a member is in a step, drawn independently each time (Poisson). Shuffled samples are not drawn so:
    use the default 1, which assumes that every member is in every step. There ε is exact, else it is a bound by Rényi
    divergences. Without noise it is infinite, without steps 0.
    """
    check_range("noise_multiplier", noise_multiplier, NON_NEGATIVE)
    check_range("steps", steps, NON_NEGATIVE)
    check_range("delta", delta, OPEN_FRACTION)
    check_range("sampling_rate", sampling_rate, POSITIVE_FRACTION)
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    dp = require("dp_accounting", "the privacy of noise is counted by dp-accounting", "privacy")
    renyi = import_module("dp_accounting.rdp")
    # Gaussian mechanisms compose to one whose noise is divided by the root of their number.
    unsampled_epsilon = float(dp.get_epsilon_gaussian(noise_multiplier / math.sqrt(steps), delta))
    if sampling_rate == 1:
        return unsampled_epsilon
    step = dp.PoissonSampledDpEvent(sampling_rate, dp.GaussianDpEvent(noise_multiplier))
    accountant = renyi.RdpAccountant(ORDERS)
    accountant.compose(dp.SelfComposedDpEvent(step, steps))
    return min(unsampled_epsilon, float(accountant.get_epsilon(delta)))  # sampling never costs privacy


def find_noise_multiplier(target: float, releases: int, delta: float = 1e-5) -> float:
    """Return the smallest noise multiplier (to 0.1 %) whose ε over all releases is at most `target`."""
    check_range("epsilon", target, Range(0, above=True))
    low, high = 1e-3, 1.0
    while epsilon(high, releases, delta=delta) > target:
        low, high = high, 2 * high
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon(middle, releases, delta=delta) > target else (low, middle)
    return high


def secure_normal(*shape: int) -> Tensor:
    """Draw from the system's entropy by Box and Muller: 64 bits each for a radius and an angle give two numbers."""
    count = math.prod(shape)
    pairs = -(-count // 2)
    bits = np.frombuffer(os.urandom(16 * pairs), np.uint64)
    radius = np.sqrt(-2.0 * np.log((bits[:pairs] + 0.5) * 2.0**-64))  # up to 9.5
    angle = bits[pairs:] * (2.0**-63 * math.pi)
    normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(normals[:count].reshape(shape))


def seeded_normal(generator: torch.Generator) -> Draw:
    """Return a reproducible source of noise, for simulations, which protect nobody."""
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def grid_step(std: float) -> float:
    """Return the step of the grid to which a sum with noise of this std is rounded."""
    return 2.0 ** (math.floor(math.log2(std)) - GRID_BITS)


def add_noise(value: Tensor, std: float, normal: Tensor) -> Tensor:
    """Return value + std · normal, rounded to the grid, in the dtype of the value."""
    if not std:
        return value
    grid = grid_step(std)
    multiples = (value.double() + std * normal.double()) / grid
    return (multiples.round() * grid).to(value.dtype)


def clipped_sum(gradients: Tensors, clip: float, real: Tensor) -> Tensors:
    """Return the sum of gradients (samples, ...), each sample's clipped to norm `clip` over all tensors."""
    squares = [value.flatten(1).square().sum(1) for value in gradients.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    scale = torch.where(real, (clip / norms.clamp(min=1e-30)).clamp(max=1.0), 0.0)
    return {key: torch.tensordot(scale, value, dims=1) for key, value in gradients.items()}


def add_noise_to_all(total: Tensors, std: float, noise: Tensor) -> Tensors:
    """Add normal noise of this std to every number; `noise` is flat and standard normal."""
    parts = torch.split(noise, [value.numel() for value in total.values()])
    named = zip(total.items(), parts, strict=True)
    return {key: add_noise(value, std, part.view(value.shape)) for (key, value), part in named}


def orthonormal_factors(matrix: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows, rank) with orthonormal columns and (rank, columns) with orthonormal rows.

    They come from one power iteration from `draw` (columns, rank) towards the matrix's leading directions.
    """
    left_factor, _ = torch.linalg.qr(matrix @ draw)
    right_factor, _ = torch.linalg.qr(matrix.mT @ left_factor)
    return left_factor, right_factor.mT


def project_gradient(left: Tensor, right: Tensor, left_gradient: Tensor, right_gradient: Tensor) -> Tensor:
    """Return a gradient of the matrix from those of its two orthonormal factors.

    It is the gradient's projection on the matrices that share columns with `left` or rows with `right`; the last term
    removes what both count (Yu et al., Large scale private learning via low-rank reparametrization, ICML 2021).
    """
    return left_gradient @ right + left @ right_gradient - left @ (left.mT @ left_gradient) @ right


def roc_auc(members: Tensor, non_members: Tensor) -> float:
    """Return the probability that a member scores above a non-member; ties count half."""
    ordered = non_members.sort().values
    below = torch.searchsorted(ordered, members) + torch.searchsorted(ordered, members, right=True)
    return (below.double().mean() / (2 * len(non_members))).item()


def roc_auc_by_class(
    members: Tensor, member_labels: Tensor, non_members: Tensor, non_member_labels: Tensor
) -> float | None:
    """Return `roc_auc` within each class, averaged by number of pairs; None without a pair.

    Within a class, because otherwise a score that only depends on the class would look like membership.
    """
    total = pairs = 0.0
    for label in sorted(set(member_labels.tolist())):
        class_members, class_non_members = members[member_labels == label], non_members[non_member_labels == label]
        if weight := len(class_members) * len(class_non_members):
            total += weight * roc_auc(class_members, class_non_members)
            pairs += weight
    return total / pairs if pairs else None


def mean_similarities(x: Tensor, y: Tensor, means: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return two membership scores by an uploaded mean: similarity to it, and to its deviation from what is expected.

    `means` and `expected` (classes, dim) are the client's and those of other clients' uploads, zero where unknown. A
    mean of n samples contains each of them by 1/n, which shows best without the direction that the class shares.
    """
    return (x * means[y]).sum(dim=1), (x * (means - expected)[y]).sum(dim=1)
