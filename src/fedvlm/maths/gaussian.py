"""Gaussian classes of one common covariance: statistics that add up, posterior, discriminant.

Sums over rows are taken in float64; all else has the precision of the moments it is given. There
are no branches on values, so that engines may vmap it.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

ABSENT_CLASS_LOGIT = -1e4  # the logit of a class without a prototype: finite, and beaten by every other
GRAM_BLOCK_COLUMNS = 128  # columns of a product of which only a triangle is asked for
MIN_SCATTER_PER_SAMPLE = 1e-4  # scatter per row below which rows of a class count as one and the same


class Moments(NamedTuple):
    """What is known of the classes; `scatter` is summed over rows around their class mean."""

    counts: Tensor  # (classes,) rows, or the weight of rows
    means: Tensor  # (classes, dim), zero for a class without rows
    scatter: Tensor  # (dim, dim), positive semidefinite


def class_membership(y: Tensor, classes: int) -> Tensor:
    """(rows, classes) 1 where a row is of a class; nothing in a row that is padding (-1)."""
    return (y[:, None] == torch.arange(classes, device=y.device)).double()


def suppress_small_classes(y: Tensor, counts: Tensor, smallest: int) -> Tensor:
    """The labels without those of classes whose `counts` are below `smallest`."""
    return torch.where((counts < smallest)[y.clamp(min=0)], -1, y)


def class_sums(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, class sums and Σ x xᵀ: sums over rows, so clients' add up to those of all rows."""
    counts, sums, triangle = packed_class_sums(x, y, classes)
    return counts, sums, unpack(triangle, x.shape[1])


def packed_class_sums(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with the last as a triangle."""
    rows = x.double() * (y >= 0)[:, None]
    sums = rows.new_zeros(classes, x.shape[1]).index_add(0, y.clamp(min=0), rows)
    return class_membership(y, classes).sum(0), sums, gram(rows)


def moments_from_sums(counts: Tensor, sums: Tensor, second: Tensor, step: float = 0.0) -> Moments:
    """Moments from sums over all clients; rounding or noise cannot make the scatter indefinite.

    `step` is that of the sums' fixed point: directions in which the scatter is no larger than what
    rounding does to it count as empty, so that one row per class leaves a scatter of exactly 0.
    """
    means = sums / counts.clamp(min=1)[:, None] * (counts > 0)[:, None]
    scatter = second - (means * counts[:, None]).mT @ means
    scatter = (scatter + scatter.mT) / 2
    floor = 4 * step * (counts.sum() * len(scatter)) ** 0.5  # every row a client of its own
    eye = torch.eye(len(scatter), dtype=scatter.dtype, device=scatter.device)
    if not int(torch.linalg.cholesky_ex(scatter - floor * eye).info):  # nothing is empty
        return Moments(counts, means, scatter)
    values, vectors = torch.linalg.eigh(scatter)
    values = torch.where(values > floor, values, 0.0)
    return Moments(counts, means, (vectors * values) @ vectors.mT)


def means_and_scatter(
    counts: Tensor, sums: Tensor, second: Tensor, centre: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Class means, and per row the scatter around them or a given `centre`; both are packed."""
    means = sums / counts.clamp(min=1)[:, None] * (counts > 0)[:, None]
    if centre is None:
        has_samples = counts > 0  # a client may have few of all classes
        around = gram(means[has_samples] * counts[has_samples].sqrt()[:, None]).neg_().add_(second)
    else:
        cross = sums.mT @ centre
        around = second - pack(cross + cross.mT - (centre * counts[:, None]).mT @ centre)
    return means, around.div_(counts.sum().clamp(min=1))


def sums_from_moments(counts: Tensor, means: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor]:
    """The sums, the second packed, that `moments` would say this of."""
    second = gram(means * counts.clamp(min=0).sqrt()[:, None]) + counts.sum() * scatter
    return means * counts[:, None], second


def posterior_moments(prior: Moments, x: Tensor, y: Tensor, alpha: float) -> Moments:
    """The moments of own rows, with the prior's rows weighing α each: a sum of squares.

    κ_c = αN_c + n_c, m_c = (αN_c z̄_c + n_c z̄ᵏ_c)/κ_c, and
    S = αS_g + Σ (z - z̄ᵏ_c)(z - z̄ᵏ_c)ᵀ + Σ_c (αN_c n_c/κ_c)(z̄ᵏ_c - z̄_c)(z̄ᵏ_c - z̄_c)ᵀ.
    """
    x = x.to(prior.means.dtype)
    one_hot = class_membership(y, len(prior.counts)).to(x.dtype)
    counts = one_hot.sum(0)
    client_means = (one_hot.mT @ x) / counts.clamp(min=1)[:, None]
    before = alpha * prior.counts
    total = before + counts
    safe = torch.where(total > 0, total, 1.0)
    means = (before[:, None] * prior.means + counts[:, None] * client_means) / safe[:, None]
    # Deviations from a class mean sum to 0, so what sets the mean apart may be added to each row:
    # a product over the rows is all, none over the classes.
    shift = (before / safe).sqrt()[:, None] * (client_means - prior.means)
    parts = (x + (shift - client_means)[y.clamp(min=0)]) * (y >= 0)[:, None]
    return Moments(total, means, alpha * prior.scatter + parts.mT @ parts)


class Discriminant(NamedTuple):
    """One linear function of a row per class, and the metric it comes from."""

    weight: Tensor  # (classes, dim)
    bias: Tensor  # (classes,)
    centre: Tensor  # (dim,) mean of the class means
    root: Tensor  # (dim, dim) lower triangle: root rootᵀ is the scatter with its ridge
    white: Tensor  # (classes, dim) class means in coordinates of unit covariance

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT + self.bias


def ridge(moments: Moments, shrinkage: float) -> Tensor:
    """λ tr(S)/(ν - 1), as CLIP-GDA shrinks; where S says nothing (one shot), from the means."""
    return ridge_from_trace(moments.counts, centred_means(moments.counts, moments.means)[1], trace(moments), shrinkage)


def ridge_from_trace(counts: Tensor, offset: Tensor, within: Tensor, shrinkage: float) -> Tensor:
    """The same by tr(S) and the class means around their mean."""
    between = (counts * offset.square().sum(-1)).sum()
    spread = torch.where(is_informative(counts, within), within, between)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return shrinkage * spread / (counts.sum() - 1).clamp(min=1)


def trace(moments: Moments) -> Tensor:
    return moments.scatter.diagonal(dim1=-2, dim2=-1).sum(-1)


def is_informative(counts: Tensor, within: Tensor) -> Tensor:
    """Whether a scatter of the trace `within` says anything."""
    return within > MIN_SCATTER_PER_SAMPLE * counts.sum()


def fit_discriminant(moments: Moments, ridge: Tensor) -> Discriminant:
    """g_c(z) = m_cᵀGz - ½m_cᵀGm_c, G = (ν + d + 2)(S + ridge I)⁻¹, up to what all classes share.

    The uniform prior is left out. A class without rows has weight 0 and the bias NEVER.
    """
    dim = moments.means.shape[-1]
    has_samples, offset, centre = centred_means(moments.counts, moments.means)
    scatter = torch.where(is_informative(moments.counts, trace(moments)), moments.scatter, 0.0)
    eye = torch.eye(dim, dtype=scatter.dtype, device=scatter.device)
    root = torch.linalg.cholesky_ex(scatter + ridge * eye)[0]
    scale = (moments.counts.sum() + dim + 2).sqrt()
    white = scale * torch.linalg.solve_triangular(root, offset.mT, upper=False)
    weight = scale * torch.linalg.solve_triangular(root.mT, white, upper=True)
    bias = -(weight.mT @ centre) - white.square().sum(0) / 2
    return Discriminant(weight.mT, torch.where(has_samples, bias, ABSENT_CLASS_LOGIT), centre, root, white.mT)


def centred_means(counts: Tensor, means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which classes have rows, their means around the mean of means, and that one."""
    has_samples = counts > 0
    centre = means.sum(0) / has_samples.sum().clamp(min=1)
    return has_samples, torch.where(has_samples[:, None], means - centre, 0.0), centre


class OffsetProducts(NamedTuple):
    """Products by G, of rows less the mean of their class with them and with class means."""

    size: Tensor  # (rows,) of a row with itself
    cross: Tensor  # (rows, classes) with the class means around their mean
    between: Tensor  # (classes, classes) of these with each other


def leave_one_out_logits(moments: Moments, rule: Discriminant, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """(rows, classes) logits of each row by the discriminant of all others, the ridge kept."""
    return leave_one_out_from_products(offset_products(moments, rule, x, y), moments.counts, y, weight, x.shape[1])


def offset_products(moments: Moments, rule: Discriminant, x: Tensor, y: Tensor) -> OffsetProducts:
    x = x.to(rule.root.dtype)
    scale = (moments.counts.sum() + x.shape[1] + 2).sqrt()
    solved = torch.linalg.solve_triangular(rule.root, (x - rule.centre).mT, upper=False)
    offset = scale * solved.mT - rule.white[y.clamp(min=0)]  # in unit covariance
    white = rule.white
    return OffsetProducts(offset.square().sum(1), offset @ white.mT, white @ white.mT)


def leave_one_out_from_products(
    products: OffsetProducts, counts: Tensor, y: Tensor, weight: Tensor, dim: int
) -> Tensor:
    """`left_out` by products: a row changes the scatter by rank one, and the mean of its class.

    `weight` (rows,) is what each counts in `counts`: 1 + α if the prior has it as well. The only
    row of a class leaves it without a prototype.
    """
    size, cross, between = products
    weight, label = weight.to(size.dtype), y.clamp(min=0)
    scale = counts.sum() + dim + 2
    label_counts = counts[label]
    remaining = label_counts - weight
    is_only_sample = remaining < weight * 1e-6
    remaining = torch.where(is_only_sample, 1.0, remaining)
    mean_shift = torch.where(is_only_sample, 0.0, weight / remaining)  # how far the class mean moves away
    drop = torch.where(is_only_sample, 0.0, weight * label_counts / remaining) / scale
    gain = drop / (1 - drop * size).clamp(min=1e-9)  # Sherman-Morrison
    label_cross = cross.gather(1, label[:, None])[:, 0]
    row_product = size + label_cross  # with the row itself
    dots, norms = cross + between[label], between.diagonal()
    logits = dots + (gain * row_product)[:, None] * cross - (norms + gain[:, None] * cross.square()) / 2
    stretch = 1 + gain * size
    label_logits = logits.gather(1, label[:, None])[:, 0]
    label_logits = (
        label_logits
        - mean_shift * stretch * row_product
        + mean_shift * stretch * label_cross
        - mean_shift.square() * stretch * size / 2
    )
    dof_ratio = ((scale - weight) / scale)[:, None]
    is_label = class_membership(label, len(counts)) > 0
    logits = dof_ratio * torch.where(is_label, label_logits[:, None], logits)
    is_absent = (counts <= 0) | (is_label & is_only_sample[:, None])
    return torch.where(is_absent, ABSENT_CLASS_LOGIT, logits)


@lru_cache(maxsize=8)
def _triangle_indices(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the upper triangle lies in a square, and where a square finds itself in a triangle."""
    row, column = torch.triu_indices(dim, dim, device=device)
    positions = torch.zeros(dim, dim, dtype=torch.long, device=device)
    positions[row, column] = positions[column, row] = torch.arange(len(row), device=device)
    return row * dim + column, positions.reshape(-1)


@lru_cache(maxsize=8)
def _gram_indices(dim: int, device: torch.device) -> Tensor:
    """Where `gram` finds the triangle in its products, one after the other."""
    row, column = torch.triu_indices(dim, dim, device=device)
    first = row - row % GRAM_BLOCK_COLUMNS
    widths = dim - torch.arange(0, dim, GRAM_BLOCK_COLUMNS, device=device)
    before = (GRAM_BLOCK_COLUMNS * widths).cumsum(0) - GRAM_BLOCK_COLUMNS * widths
    out: Tensor = before[row // GRAM_BLOCK_COLUMNS] + (row - first) * (dim - first) + column - first
    return out


def gram(x: Tensor) -> Tensor:
    """xᵀx of (..., rows, dim) as `pack` has it, without most of what is below the diagonal."""
    dim = x.shape[-1]
    firsts = range(0, dim, GRAM_BLOCK_COLUMNS)
    blocks = [(x[..., i : i + GRAM_BLOCK_COLUMNS].mT @ x[..., i:]).flatten(-2) for i in firsts]
    out: Tensor = torch.cat(blocks, -1).index_select(-1, _gram_indices(dim, x.device))
    return out


def pack(square: Tensor) -> Tensor:
    """One triangle of a symmetric (..., dim, dim), row by row: (..., dim (dim + 1) / 2)."""
    return square.flatten(-2).index_select(-1, _triangle_indices(square.shape[-1], square.device)[0])


def unpack(triangle: Tensor, dim: int) -> Tensor:
    square = triangle.index_select(-1, _triangle_indices(dim, triangle.device)[1])
    return square.reshape(*triangle.shape[:-1], dim, dim)


def nearest_semidefinite(square: Tensor) -> Tensor:
    """A sum of squares as it is; a lie, or numbers' medians, without what makes them none."""
    size = square.diagonal().abs().mean().clamp(min=torch.finfo(square.dtype).tiny)
    eye = torch.eye(len(square), dtype=square.dtype)
    if not int(torch.linalg.cholesky_ex(square + 1e-5 * size * eye).info):
        return square
    values, vectors = torch.linalg.eigh((square + square.mT) / 2)
    out: Tensor = (vectors * values.clamp(min=0)) @ vectors.mT
    return out


def fixed_point_step(max_samples: int) -> float:
    """The step of a 32-bit fixed point that holds sums over `most` rows of unit norm."""
    return max_samples / 2.0**31


def to_fixed_point(value: Tensor, max_samples: int) -> Tensor:
    """int32 multiples of the quantum: they add up exactly, in any order and under a secure sum."""
    return (value.double() / fixed_point_step(max_samples)).round().clamp(-(2**31), 2**31 - 1).to(torch.int32)


def from_fixed_point(value: Tensor, max_samples: int) -> Tensor:
    return value.to(torch.float64, copy=True).mul_(fixed_point_step(max_samples))
