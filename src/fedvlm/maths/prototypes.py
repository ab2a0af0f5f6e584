"""Class statistics on their way: what may leave a client, the prior made of all, a client's rule.

One row more or less changes a count by 1, a class sum by a vector of norm 1 and the triangle of
Σ x xᵀ by one of norm 1 at most: √3 together, which is what noise is measured by.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fedvlm.maths import gaussian, lowrank
from fedvlm.maths.gaussian import Moments
from fedvlm.maths.lowrank import Basis, ClientDiscriminant
from fedvlm.maths.noise import add_noise
from fedvlm.tensors import Tensors, remember_latest

LOW_RANK_DIM_RATIO = 2  # a client has few rows if there are so many times as many dimensions
LOW_RANK_MIN_SHRINKAGE = 0.1  # the least ridge at which float32 leaves rows out that way as well as by a Cholesky
SENSITIVITY = 3**0.5  # what one row can change, over all statistics


def count_noise_values(classes: int, dim: int) -> int:
    """How many numbers of noise one release takes."""
    return classes + classes * dim + dim * (dim + 1) // 2


def released_class_sums(
    x: Tensor, y: Tensor, allowed: Tensor, smallest: int, multiplier: float, normal: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, class sums and the triangle of Σ x xᵀ of classes that may be uploaded, with noise.

    `allowed` (classes,) is True where a class may be. What is left out is chosen by the counts that
    are uploaded, noise and all, so the choice gives nothing away.
    """
    classes, dim = len(allowed), x.shape[1]
    counts = gaussian.class_membership(y, classes).sum(0)
    if multiplier:
        std = multiplier * SENSITIVITY
        ends = [classes, classes + classes * dim]
        on_counts, on_sums, on_second = normal.double().tensor_split(ends)
        counts = add_noise(counts, std, on_counts).round()
        x = x.double() / x.norm(dim=1, keepdim=True).clamp(min=1)
    counts = torch.where(allowed, counts, 0.0)  # a mask: it cannot raise a count
    is_released = counts >= smallest
    _, sums, second = gaussian.packed_class_sums(x, gaussian.suppress_small_classes(y, counts, smallest), classes)
    if multiplier:
        sums = add_noise(sums, std, on_sums.reshape(classes, dim))
        sums = torch.where(is_released[:, None], sums, 0.0)
        second = add_noise(second, std, on_second)
    return torch.where(is_released, counts, 0.0), sums, second


def pack_statistics(counts: Tensor, sums: Tensor, second: Tensor, max_samples: int) -> Tensors:
    """As whole numbers, which add up exactly; for clients of `most` rows at most."""
    return {
        "counts": counts.to(torch.int32),
        "sums": gaussian.to_fixed_point(sums, max_samples),
        "moments": gaussian.to_fixed_point(second, max_samples),
    }


def add_uploads(uploads: Sequence[Tensors], keys: Collection[str]) -> Tensors:
    """The exact sums of packed statistics, one client after the other: they are many."""
    total = {key: torch.zeros_like(uploads[0][key], dtype=torch.long) for key in keys}
    for upload in uploads:
        for key, value in total.items():
            value += upload[key]
    return total


def class_means(upload: Tensors, max_samples: int) -> Tensor:
    """(classes, dim) what packed statistics say of the class means."""
    return gaussian.from_fixed_point(upload["sums"], max_samples) / upload["counts"].clamp(min=1)[:, None]


def empty_prior(classes: int, dim: int) -> Tensors:
    """The prior before anything was released: nothing, and a discriminant that says nothing."""
    return {
        "counts": torch.zeros(classes),
        "means": torch.zeros(classes, dim),
        "scatter": torch.zeros(dim * (dim + 1) // 2),
        "weight": torch.zeros(classes, dim),
        "bias": torch.zeros(classes),
    }


def pooled_prior(total: Tensors, max_samples: int, shrinkage: float) -> Tensors:
    """The posterior of all rows under an uninformative prior, and its discriminant."""
    pooled = gaussian.moments_from_sums(
        total["counts"].double(),
        gaussian.from_fixed_point(total["sums"], max_samples),
        gaussian.unpack(gaussian.from_fixed_point(total["moments"], max_samples), total["sums"].shape[1]),
        gaussian.fixed_point_step(max_samples),
    )
    rule = gaussian.fit_discriminant(pooled, gaussian.ridge(pooled, shrinkage))
    moments = {
        "counts": pooled.counts,
        "means": pooled.means,
        "scatter": gaussian.pack(pooled.scatter),
    }
    prior_tensors = {**moments, "weight": rule.weight, "bias": rule.bias}
    return {key: value.float() for key, value in prior_tensors.items()}


def fit_client_discriminant(prior: Tensors, x: Tensor, y: Tensor, alpha: float, shrinkage: float) -> ClientDiscriminant:
    """A client's posterior, the prior's rows weighing α each, and its discriminant."""
    if LOW_RANK_DIM_RATIO * len(x) <= x.shape[1] and shrinkage >= LOW_RANK_MIN_SHRINKAGE:
        held = [prior[key] for key in ("counts", "means", "scatter")]
        return lowrank.fit_low_rank(_basis(*held), x, y, alpha, shrinkage)
    posterior = gaussian.posterior_moments(_moments(prior), x, y, alpha)
    rule = gaussian.fit_discriminant(posterior, gaussian.ridge(posterior, shrinkage))
    return ClientDiscriminant(posterior.counts, rule.weight, rule.bias, gaussian.offset_products(posterior, rule, x, y))


def _moments(prior: Tensors) -> Moments:
    scatter = gaussian.unpack(prior["scatter"], prior["means"].shape[1])
    return Moments(prior["counts"], prior["means"], scatter)


@remember_latest
def _basis(counts: Tensor, means: Tensor, scatter: Tensor) -> Basis:
    return lowrank.eigenbasis(_moments({"counts": counts, "means": means, "scatter": scatter}))


def discriminant_change(rule: ClientDiscriminant, prior: Tensors) -> Tensors:
    """How a client's discriminant differs from the prior's."""
    new = {"weight": rule.weight, "bias": rule.bias}
    return {f"{key} change": value - prior[key] for key, value in new.items()}
