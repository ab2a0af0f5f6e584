"""A client's discriminant where it has few rows beside a prior that all clients share.

In the eigenbasis of the prior's scatter that scatter and a ridge of any size are diagonal: one
decomposition serves every client, whose n rows add a correction (Woodbury) by a system of n
unknowns. Nothing that a client does is of the order of dim³.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.maths.gaussian import (
    ABSENT_CLASS_LOGIT,
    Moments,
    OffsetProducts,
    centred_means,
    is_informative,
    ridge_from_trace,
)


class Basis(NamedTuple):
    """A prior in the eigenbasis of its scatter."""

    vectors: Tensor  # (dim, dim) in columns
    values: Tensor  # (dim,)
    counts: Tensor  # (classes,)
    means: Tensor  # (classes, dim)


def eigenbasis(prior: Moments) -> Basis:
    """By float64: the smallest eigenvalues count most, and float32 has none of their digits."""
    values, vectors = torch.linalg.eigh(prior.scatter.double())
    kind = prior.means.dtype
    vectors = vectors.to(kind)
    values = values.clamp(min=0).to(kind)
    return Basis(vectors, values, prior.counts, prior.means @ vectors)


class ClientDiscriminant(NamedTuple):
    """What `gaussian.posterior` and `gaussian.discriminant` would make of the rows."""

    counts: Tensor  # (classes,) of rows, the prior's weighing α
    weight: Tensor  # (classes, dim)
    bias: Tensor  # (classes,)
    products: OffsetProducts


def fit_low_rank(prior: Basis, x: Tensor, y: Tensor, alpha: float, shrinkage: float) -> ClientDiscriminant:
    label, real = y.clamp(min=0), (y >= 0).to(prior.means.dtype)
    x = (x.to(prior.means.dtype) @ prior.vectors) * real[:, None]
    client_counts = torch.zeros_like(prior.counts).index_add(0, label, real)
    sums = torch.zeros_like(prior.means).index_add(0, label, x)
    before = alpha * prior.counts
    counts = before + client_counts
    safe = torch.where(counts > 0, counts, 1.0)
    means = (before[:, None] * prior.means + sums) / safe[:, None]
    mean = sums / client_counts.clamp(min=1)[:, None]
    shift = (before / safe).sqrt()[:, None] * (mean - prior.means)
    parts = x + (shift - mean).index_select(0, label) * real[:, None]  # as in `posterior`
    has_samples, offset, centre = centred_means(counts, means)
    within = alpha * prior.values.sum() + parts.square().sum()
    ridge = ridge_from_trace(counts, offset, within, shrinkage)
    informative = is_informative(counts, within).to(x.dtype)
    root = (informative * alpha * prior.values + ridge).rsqrt()  # of the inverse of what is diagonal
    scale = counts.sum() + x.shape[1] + 2
    parts = parts * (informative * root)
    eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(eye + parts @ parts.mT)[0])
    white = offset * root
    weight = scale * (white - (white @ parts.mT @ inverse) @ parts) * root
    rows = x - means.index_select(0, label) * real[:, None]
    whitened = rows * root
    onto = whitened @ parts.mT
    size = scale * (whitened.square().sum(1) - (onto @ inverse * onto).sum(1))
    between = offset @ weight.mT
    bias = torch.where(has_samples, -(weight @ centre) - between.diagonal() / 2, ABSENT_CLASS_LOGIT)
    products = OffsetProducts(size.clamp(min=0), rows @ weight.mT, between)
    return ClientDiscriminant(counts, weight @ prior.vectors.mT, bias, products)
