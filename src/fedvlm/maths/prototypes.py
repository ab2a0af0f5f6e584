"""Class statistics on their way: what may leave a client, the prior made of all, a client's rule.

One row more or less changes a count by 1, a class sum by a vector of norm 1 and the triangle of
Σ x xᵀ by one of norm 1 at most: √3 together, which is what noise is measured by.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fedvlm.maths import gaussian, lowrank
from fedvlm.maths.gaussian import Moments
from fedvlm.maths.lowrank import Basis, Own
from fedvlm.maths.noise import cover
from fedvlm.tensors import Tensors, latest

FEW = 2  # a client has few rows if there are so many times as many dimensions
STEADY = 0.1  # the least ridge at which float32 leaves rows out that way as well as by a Cholesky
REACH = 3**0.5  # what one row can change, over all statistics


def numbers(classes: int, dim: int) -> int:
    """How many numbers of noise one release takes."""
    return classes + classes * dim + dim * (dim + 1) // 2


def released(
    x: Tensor, y: Tensor, allowed: Tensor, smallest: int, multiplier: float, normal: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, class sums and the triangle of Σ x xᵀ of classes that may be uploaded, with noise.

    `allowed` (classes,) is True where a class may be. What is left out is chosen by the counts that
    are uploaded, noise and all, so the choice gives nothing away.
    """
    classes, dim = len(allowed), x.shape[1]
    counts = gaussian.members(y, classes).sum(0)
    if multiplier:
        deviation = multiplier * REACH
        ends = [classes, classes + classes * dim]
        on_counts, on_sums, on_second = normal.double().tensor_split(ends)
        counts = cover(counts, deviation, on_counts).round()
        x = x.double() / x.norm(dim=1, keepdim=True).clamp(min=1)
    counts = torch.where(allowed, counts, 0.0)  # a mask: it cannot raise a count
    there = counts >= smallest
    _, sums, second = gaussian.sums_over(x, gaussian.withheld(y, counts, smallest), classes)
    if multiplier:
        sums = cover(sums, deviation, on_sums.reshape(classes, dim))
        sums = torch.where(there[:, None], sums, 0.0)
        second = cover(second, deviation, on_second)
    return torch.where(there, counts, 0.0), sums, second


def packed(counts: Tensor, sums: Tensor, second: Tensor, most: int) -> Tensors:
    """As whole numbers, which add up exactly; for clients of `most` rows at most."""
    return {
        "counts": counts.to(torch.int32),
        "sums": gaussian.to_fixed(sums, most),
        "moments": gaussian.to_fixed(second, most),
    }


def added(uploads: Sequence[Tensors], keys: Collection[str]) -> Tensors:
    """The exact sums of packed statistics, one client after the other: they are many."""
    total = {key: torch.zeros_like(uploads[0][key], dtype=torch.long) for key in keys}
    for one in uploads:
        for key, value in total.items():
            value += one[key]
    return total


def means(upload: Tensors, most: int) -> Tensor:
    """(classes, dim) what packed statistics say of the class means."""
    return gaussian.from_fixed(upload["sums"], most) / upload["counts"].clamp(min=1)[:, None]


def unknown(classes: int, dim: int) -> Tensors:
    """The prior before anything was released: nothing, and a discriminant that says nothing."""
    return {
        "counts": torch.zeros(classes),
        "means": torch.zeros(classes, dim),
        "scatter": torch.zeros(dim * (dim + 1) // 2),
        "weight": torch.zeros(classes, dim),
        "bias": torch.zeros(classes),
    }


def prior(total: Tensors, most: int, shrinkage: float) -> Tensors:
    """The posterior of all rows under an uninformative prior, and its discriminant."""
    known = gaussian.centred(
        total["counts"].double(),
        gaussian.from_fixed(total["sums"], most),
        gaussian.unpack(gaussian.from_fixed(total["moments"], most), total["sums"].shape[1]),
        gaussian.quantum(most),
    )
    rule = gaussian.discriminant(known, gaussian.ridge(known, shrinkage))
    moments = {
        "counts": known.counts,
        "means": known.means,
        "scatter": gaussian.pack(known.scatter),
    }
    both = {**moments, "weight": rule.weight, "bias": rule.bias}
    return {key: value.float() for key, value in both.items()}


def own(prior: Tensors, x: Tensor, y: Tensor, alpha: float, shrinkage: float) -> Own:
    """A client's posterior, the prior's rows weighing α each, and its discriminant."""
    if FEW * len(x) <= x.shape[1] and shrinkage >= STEADY:
        held = [prior[key] for key in ("counts", "means", "scatter")]
        return lowrank.own(_basis(*held), x, y, alpha, shrinkage)
    known = gaussian.posterior(_moments(prior), x, y, alpha)
    rule = gaussian.discriminant(known, gaussian.ridge(known, shrinkage))
    return Own(known.counts, rule.weight, rule.bias, gaussian.apart(known, rule, x, y))


def _moments(prior: Tensors) -> Moments:
    scatter = gaussian.unpack(prior["scatter"], prior["means"].shape[1])
    return Moments(prior["counts"], prior["means"], scatter)


@latest
def _basis(counts: Tensor, means: Tensor, scatter: Tensor) -> Basis:
    return lowrank.basis(_moments({"counts": counts, "means": means, "scatter": scatter}))


def change(rule: Own, prior: Tensors) -> Tensors:
    """How a client's discriminant differs from the prior's."""
    new = {"weight": rule.weight, "bias": rule.bias}
    return {f"{key} change": value - prior[key] for key, value in new.items()}
