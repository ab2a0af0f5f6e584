"""Gaussian classes of one common covariance: statistics that add up, posterior, discriminant.

Sums over rows are taken in float64; all else has the precision of the moments it is given. There
are no branches on values, so that engines may vmap it.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.maths.privacy import add_noise
from fedvlm.tensors import Tensors, remember_latest

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
    counts = class_membership(y, classes).sum(0)
    if multiplier:
        std = multiplier * SENSITIVITY
        ends = [classes, classes + classes * dim]
        on_counts, on_sums, on_second = normal.double().tensor_split(ends)
        counts = add_noise(counts, std, on_counts).round()
        x = x.double() / x.norm(dim=1, keepdim=True).clamp(min=1)
    counts = torch.where(allowed, counts, 0.0)  # a mask: it cannot raise a count
    is_released = counts >= smallest
    _, sums, second = packed_class_sums(x, suppress_small_classes(y, counts, smallest), classes)
    if multiplier:
        sums = add_noise(sums, std, on_sums.reshape(classes, dim))
        sums = torch.where(is_released[:, None], sums, 0.0)
        second = add_noise(second, std, on_second)
    return torch.where(is_released, counts, 0.0), sums, second


def pack_statistics(counts: Tensor, sums: Tensor, second: Tensor, max_samples: int) -> Tensors:
    """As whole numbers, which add up exactly; for clients of `most` rows at most."""
    return {
        "counts": counts.to(torch.int32),
        "sums": to_fixed_point(sums, max_samples),
        "moments": to_fixed_point(second, max_samples),
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
    return from_fixed_point(upload["sums"], max_samples) / upload["counts"].clamp(min=1)[:, None]


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
    pooled = moments_from_sums(
        total["counts"].double(),
        from_fixed_point(total["sums"], max_samples),
        unpack(from_fixed_point(total["moments"], max_samples), total["sums"].shape[1]),
        fixed_point_step(max_samples),
    )
    rule = fit_discriminant(pooled, ridge(pooled, shrinkage))
    moments = {
        "counts": pooled.counts,
        "means": pooled.means,
        "scatter": pack(pooled.scatter),
    }
    prior_tensors = {**moments, "weight": rule.weight, "bias": rule.bias}
    return {key: value.float() for key, value in prior_tensors.items()}


def fit_client_discriminant(prior: Tensors, x: Tensor, y: Tensor, alpha: float, shrinkage: float) -> ClientDiscriminant:
    """A client's posterior, the prior's rows weighing α each, and its discriminant."""
    if LOW_RANK_DIM_RATIO * len(x) <= x.shape[1] and shrinkage >= LOW_RANK_MIN_SHRINKAGE:
        held = [prior[key] for key in ("counts", "means", "scatter")]
        return fit_low_rank(_basis(*held), x, y, alpha, shrinkage)
    posterior = posterior_moments(_moments(prior), x, y, alpha)
    rule = fit_discriminant(posterior, ridge(posterior, shrinkage))
    return ClientDiscriminant(posterior.counts, rule.weight, rule.bias, offset_products(posterior, rule, x, y))


def _moments(prior: Tensors) -> Moments:
    scatter = unpack(prior["scatter"], prior["means"].shape[1])
    return Moments(prior["counts"], prior["means"], scatter)


@remember_latest
def _basis(counts: Tensor, means: Tensor, scatter: Tensor) -> Basis:
    return eigenbasis(_moments({"counts": counts, "means": means, "scatter": scatter}))


def discriminant_change(rule: ClientDiscriminant, prior: Tensors) -> Tensors:
    """How a client's discriminant differs from the prior's."""
    new = {"weight": rule.weight, "bias": rule.bias}
    return {f"{key} change": value - prior[key] for key, value in new.items()}
