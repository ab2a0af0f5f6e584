"""Model classes as Gaussians of one covariance: sums that clients may upload, posterior, discriminant.

Sums over samples are taken in float64; all else has the precision of the moments it is given. Nothing branches on
values, so that engines may vmap it. It is our own code because clients' sums must add up exactly in any order, and
because one eigenbasis of the prior serves all clients: no client does work of order dim³.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.maths.privacy import add_noise
from fedvlm.tensors import Tensors, remember_latest

ABSENT_CLASS_LOGIT = -1e4  # of a class without samples: finite, and below every other logit
GRAM_BLOCK_COLUMNS = 128  # columns of a block of a product of which only the triangle is needed
MIN_SCATTER_PER_SAMPLE = 1e-4  # below it, the samples of a class count as identical
LOW_RANK_DIM_RATIO = 2  # a low-rank fit is faster if there are so many dimensions per sample
LOW_RANK_MIN_SHRINKAGE = 0.1  # the least ridge at which a low-rank fit is as exact in float32 as a Cholesky factor
# L2: a sample replaced by one of another class changes two counts by 1, two class sums by norm 1, and the triangle of
# Σ x xᵀ by at most √2; other pairs change less (docs/security/privacy.md).
SENSITIVITY = 6**0.5


class Moments(NamedTuple):
    """Counts, means and the common scatter of the classes."""

    counts: Tensor  # (classes,) samples, or their weight
    means: Tensor  # (classes, dim), zero for a class without samples
    scatter: Tensor  # (dim, dim), positive semidefinite: summed over samples around their class mean


def class_membership(y: Tensor, classes: int) -> Tensor:
    """Return (samples, classes) one-hot labels; a row of padding (-1) is all zero."""
    return (y[:, None] == torch.arange(classes, device=y.device)).double()


def balanced_weights(y: Tensor, classes: int) -> Tensor:
    """Return (..., classes) weights of equal classes in (..., samples); over the samples they are 1 on average."""
    counts = (y[..., None] == torch.arange(classes, device=y.device)).sum(-2)
    present = (counts > 0).sum(-1, keepdim=True)
    return counts.sum(-1, keepdim=True) / (present * counts).clamp(min=1)


def suppress_small_classes(y: Tensor, counts: Tensor, min_samples: int) -> Tensor:
    """Return the labels with -1 for those of classes whose `counts` are below `min_samples`."""
    return torch.where((counts < min_samples)[y.clamp(min=0)], -1, y)


def suppress_closed_classes(y: Tensor, is_open: Tensor) -> Tensor:
    """Return the labels with -1 for samples of classes that are not open."""
    return torch.where((y >= 0) & is_open[y.clamp(min=0)], y, -1)


def diagonal_of(triangle: Tensor, dim: int) -> Tensor:
    """Return the diagonal of a packed symmetric matrix."""
    rows = torch.arange(dim, device=triangle.device)
    return triangle.index_select(-1, rows * dim - rows * (rows - 1) // 2)


def gram_from_diagonal(diagonal: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
    """Return a packed Σ x xᵀ from its diagonal and class sums, as if no coordinates correlated within a class."""
    between = (sums / counts.clamp(min=1)[:, None]).mT @ sums
    within = (diagonal - between.diagonal()).clamp(min=0)
    return pack(between + torch.diag(within))


def class_sums(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts, class sums and Σ x xᵀ, which add up over clients."""
    counts, sums, triangle = packed_class_sums(x, y, classes)
    return counts, sums, unpack(triangle, x.shape[1])


def packed_class_sums(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same, with Σ x xᵀ as a triangle."""
    samples = x.double() * (y >= 0)[:, None]
    sums = samples.new_zeros(classes, x.shape[1]).index_add(0, y.clamp(min=0), samples)
    return class_membership(y, classes).sum(0), sums, gram(samples)


def moments_from_sums(counts: Tensor, sums: Tensor, second: Tensor, step: float = 0.0) -> Moments:
    """Return moments from sums over all clients; rounding or noise cannot make the scatter indefinite.

    `step` is that of the sums' fixed point: directions in which the scatter is no larger than its rounding error count
    as empty, so that one sample per class leaves a scatter of exactly 0.
    """
    means = sums / counts.clamp(min=1)[:, None] * (counts > 0)[:, None]
    scatter = second - (means * counts[:, None]).mT @ means
    scatter = (scatter + scatter.mT) / 2
    floor = 4 * step * (counts.sum() * len(scatter)) ** 0.5  # the worst case: each sample is another client's
    eye = torch.eye(len(scatter), dtype=scatter.dtype, device=scatter.device)
    if not int(torch.linalg.cholesky_ex(scatter - floor * eye).info):  # no direction is empty
        return Moments(counts, means, scatter)
    values, vectors = torch.linalg.eigh(scatter)
    values = torch.where(values > floor, values, 0.0)
    return Moments(counts, means, (vectors * values) @ vectors.mT)


def means_and_scatter(
    counts: Tensor, sums: Tensor, second: Tensor, centre: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return class means, and the packed scatter per sample around them or a given `centre`."""
    has_samples = counts > 0
    means = sums / counts.clamp(min=1)[:, None] * has_samples[:, None]
    if centre is None:  # a client may have samples of few classes
        around = gram(means[has_samples] * counts[has_samples].sqrt()[:, None]).neg_().add_(second)
    else:
        cross = sums.mT @ centre
        around = second - pack(cross + cross.mT - (centre * counts[:, None]).mT @ centre)
    return means, around.div_(counts.sum().clamp(min=1))


def sums_from_moments(counts: Tensor, means: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `means_and_scatter`: return class sums and packed Σ x xᵀ."""
    second = gram(means * counts.clamp(min=0).sqrt()[:, None]) + counts.sum() * scatter
    return means * counts[:, None], second


def posterior_moments(prior: Moments, x: Tensor, y: Tensor, alpha: float) -> Moments:
    """Return the moments of a client's samples and of the prior's, each of which weighs α.

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
    # Deviations from a class mean sum to 0, so the shift of the mean may be added to each sample: this takes one
    # product over samples and none over classes.
    shift = (before / safe).sqrt()[:, None] * (client_means - prior.means)
    deviations = (x + (shift - client_means)[y.clamp(min=0)]) * (y >= 0)[:, None]
    return Moments(total, means, alpha * prior.scatter + deviations.mT @ deviations)


class Discriminant(NamedTuple):
    """A linear classifier, and the metric it comes from."""

    weight: Tensor  # (classes, dim)
    bias: Tensor  # (classes,)
    centre: Tensor  # (dim,) mean of the class means
    root: Tensor  # (dim, dim) Cholesky factor of the scatter with its ridge
    white: Tensor  # (classes, dim) class means in coordinates of unit covariance

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT + self.bias


def ridge(moments: Moments, shrinkage: float) -> Tensor:
    """Return λ tr(S)/(ν - 1), CLIP-GDA's ridge; where S is not informative (one shot), from the class means."""
    offset = centred_means(moments.counts, moments.means)[1]
    return ridge_from_trace(moments.counts, offset, trace(moments), shrinkage)


def ridge_from_trace(counts: Tensor, offset: Tensor, within: Tensor, shrinkage: float) -> Tensor:
    """Return the same from tr(S) and the centred class means."""
    between = (counts * offset.square().sum(-1)).sum()
    spread = torch.where(is_informative(counts, within), within, between)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return shrinkage * spread / (counts.sum() - 1).clamp(min=1)


def trace(moments: Moments) -> Tensor:
    return moments.scatter.diagonal(dim1=-2, dim2=-1).sum(-1)


def is_informative(counts: Tensor, within: Tensor) -> Tensor:
    """Return whether a scatter of trace `within` tells samples of a class apart."""
    return within > MIN_SCATTER_PER_SAMPLE * counts.sum()


def fit_discriminant(moments: Moments, ridge: Tensor) -> Discriminant:
    """Return g_c(z) = m_cᵀGz - ½m_cᵀGm_c with G = (ν + d + 2)(S + ridge I)⁻¹, up to a term common to all classes.

    Classes have a uniform prior. A class without samples has weight 0 and the bias ABSENT_CLASS_LOGIT.
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


def pooled_moments(counts: Tensor, sums: Tensor, gram: Tensor) -> Moments:
    """Return the moments of the named classes from sums of all clients.

    The last count and sum are of samples whose class is not named; `gram` is the packed Σ x xᵀ of all samples, with a
    last coordinate of 1.
    """
    second = nearest_semidefinite(unpack(gram, sums.shape[1] + 1))[:-1, :-1]
    moments = moments_from_sums(counts, sums, second)
    return Moments(moments.counts[:-1], moments.means[:-1], moments.scatter)


def centred_means(counts: Tensor, means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which classes have samples, the means less the mean of means, and that mean."""
    has_samples = counts > 0
    centre = means.sum(0) / has_samples.sum().clamp(min=1)
    return has_samples, torch.where(has_samples[:, None], means - centre, 0.0), centre


class OffsetProducts(NamedTuple):
    """Inner products by G of samples less their class mean (offsets) and of centred class means."""

    size: Tensor  # (samples,) of an offset with itself
    cross: Tensor  # (samples, classes) of offsets with centred class means
    between: Tensor  # (classes, classes) of centred class means


def leave_one_out_logits(moments: Moments, rule: Discriminant, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return (samples, classes) logits of each sample by the discriminant of all others, with the same ridge."""
    return leave_one_out_from_products(offset_products(moments, rule, x, y), moments.counts, y, weight, x.shape[1])


def offset_products(moments: Moments, rule: Discriminant, x: Tensor, y: Tensor) -> OffsetProducts:
    """Return the products that leaving samples out needs."""
    x = x.to(rule.root.dtype)
    scale = (moments.counts.sum() + x.shape[1] + 2).sqrt()
    solved = torch.linalg.solve_triangular(rule.root, (x - rule.centre).mT, upper=False)
    offset = scale * solved.mT - rule.white[y.clamp(min=0)]  # in unit covariance
    white = rule.white
    return OffsetProducts(offset.square().sum(1), offset @ white.mT, white @ white.mT)


def leave_one_out_from_products(
    products: OffsetProducts, counts: Tensor, y: Tensor, weight: Tensor, dim: int
) -> Tensor:
    """Return leave-one-out logits from products: a sample changes the scatter by rank one, and its class mean.

    `weight` (samples,) is what each adds to `counts`: 1 + α if the prior has it as well. Without its only sample a
    class is absent.
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
    row_product = size + label_cross  # of the offset with the sample itself
    dots, norms = cross + between[label], between.diagonal()
    logits = dots + (gain * row_product)[:, None] * cross - (norms + gain[:, None] * cross.square()) / 2
    stretch = 1 + gain * size
    label_logits = logits.gather(1, label[:, None])[:, 0]
    label_logits = label_logits - mean_shift * stretch * row_product + mean_shift * stretch * label_cross
    label_logits = label_logits - mean_shift.square() * stretch * size / 2
    dof_ratio = ((scale - weight) / scale)[:, None]
    is_label = class_membership(label, len(counts)) > 0
    logits = dof_ratio * torch.where(is_label, label_logits[:, None], logits)
    is_absent = (counts <= 0) | (is_label & is_only_sample[:, None])
    return torch.where(is_absent, ABSENT_CLASS_LOGIT, logits)


@lru_cache(maxsize=8)
def _triangle_indices(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions of the upper triangle in a square, and of the square's entries in the triangle."""
    row, column = torch.triu_indices(dim, dim, device=device)
    positions = torch.zeros(dim, dim, dtype=torch.long, device=device)
    positions[row, column] = positions[column, row] = torch.arange(len(row), device=device)
    return row * dim + column, positions.reshape(-1)


@lru_cache(maxsize=8)
def _gram_indices(dim: int, device: torch.device) -> Tensor:
    """Return positions of the upper triangle in the concatenated blocks of `gram`."""
    row, column = torch.triu_indices(dim, dim, device=device)
    first = row - row % GRAM_BLOCK_COLUMNS
    widths = dim - torch.arange(0, dim, GRAM_BLOCK_COLUMNS, device=device)
    before = (GRAM_BLOCK_COLUMNS * widths).cumsum(0) - GRAM_BLOCK_COLUMNS * widths
    out: Tensor = before[row // GRAM_BLOCK_COLUMNS] + (row - first) * (dim - first) + column - first
    return out


def gram(x: Tensor) -> Tensor:
    """Return xᵀx of (..., samples, dim) packed, without computing most of what is below the diagonal."""
    dim = x.shape[-1]
    firsts = range(0, dim, GRAM_BLOCK_COLUMNS)
    blocks = [(x[..., i : i + GRAM_BLOCK_COLUMNS].mT @ x[..., i:]).flatten(-2) for i in firsts]
    out: Tensor = torch.cat(blocks, -1).index_select(-1, _gram_indices(dim, x.device))
    return out


def pack(square: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric (..., dim, dim), row by row: (..., dim (dim + 1) / 2)."""
    return square.flatten(-2).index_select(-1, _triangle_indices(square.shape[-1], square.device)[0])


def unpack(triangle: Tensor, dim: int) -> Tensor:
    """Invert `pack`."""
    square = triangle.index_select(-1, _triangle_indices(dim, triangle.device)[1])
    return square.reshape(*triangle.shape[:-1], dim, dim)


def nearest_semidefinite(square: Tensor) -> Tensor:
    """Drop negative eigenvalues (of robust means, or of an attack); a semidefinite matrix stays as it is."""
    size = square.diagonal().abs().mean().clamp(min=torch.finfo(square.dtype).tiny)
    eye = torch.eye(len(square), dtype=square.dtype)
    if not int(torch.linalg.cholesky_ex(square + 1e-5 * size * eye).info):
        return square
    values, vectors = torch.linalg.eigh((square + square.mT) / 2)
    out: Tensor = (vectors * values.clamp(min=0)) @ vectors.mT
    return out


def fixed_point_step(max_samples: int) -> float:
    """Return the step of a 32-bit fixed point that holds sums over `max_samples` of unit norm."""
    return max_samples / 2.0**31


def to_fixed_point(value: Tensor, max_samples: int) -> Tensor:
    """Round to int32 multiples of the step: these add up exactly, in any order and in a verified sum."""
    return (value.double() / fixed_point_step(max_samples)).round().clamp(-(2**31), 2**31 - 1).to(torch.int32)


def from_fixed_point(value: Tensor, max_samples: int) -> Tensor:
    """Return the float64 numbers of a fixed point."""
    return value.to(torch.float64, copy=True).mul_(fixed_point_step(max_samples))


class Basis(NamedTuple):
    """A prior in the eigenbasis of its scatter, in which the scatter with a ridge of any size is diagonal."""

    vectors: Tensor  # (dim, dim) in columns
    values: Tensor  # (dim,)
    counts: Tensor  # (classes,)
    means: Tensor  # (classes, dim)


def eigenbasis(prior: Moments) -> Basis:
    """Decompose in float64: the smallest eigenvalues count most, and float32 has none of their digits."""
    values, vectors = torch.linalg.eigh(prior.scatter.double())
    vectors = vectors.to(prior.means.dtype)
    return Basis(vectors, values.clamp(min=0).to(prior.means.dtype), prior.counts, prior.means @ vectors)


class ClientDiscriminant(NamedTuple):
    """A client's discriminant by its posterior, and the products that leaving samples out needs."""

    counts: Tensor  # (classes,) samples, the prior's weighing α
    weight: Tensor  # (classes, dim)
    bias: Tensor  # (classes,)
    products: OffsetProducts


def fit_low_rank(prior: Basis, x: Tensor, y: Tensor, alpha: float, shrinkage: float) -> ClientDiscriminant:
    """Do what `posterior_moments` and `fit_discriminant` do, for n samples by a system of n unknowns (Woodbury)."""
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
    deviations = x + (shift - mean).index_select(0, label) * real[:, None]  # as in `posterior_moments`
    has_samples, offset, centre = centred_means(counts, means)
    within = alpha * prior.values.sum() + deviations.square().sum()
    ridge = ridge_from_trace(counts, offset, within, shrinkage)
    informative = is_informative(counts, within).to(x.dtype)
    root = (informative * alpha * prior.values + ridge).rsqrt()  # of the inverse of the diagonal part
    scale = counts.sum() + x.shape[1] + 2
    parts = deviations * (informative * root)
    eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(eye + parts @ parts.mT)[0])
    white = offset * root
    weight = scale * (white - (white @ parts.mT @ inverse) @ parts) * root
    offsets = x - means.index_select(0, label) * real[:, None]
    whitened = offsets * root
    onto = whitened @ parts.mT
    size = scale * (whitened.square().sum(1) - (onto @ inverse * onto).sum(1))
    between = offset @ weight.mT
    bias = torch.where(has_samples, -(weight @ centre) - between.diagonal() / 2, ABSENT_CLASS_LOGIT)
    products = OffsetProducts(size.clamp(min=0), offsets @ weight.mT, between)
    return ClientDiscriminant(counts, weight @ prior.vectors.mT, bias, products)


def count_noise_values(classes: int, dim: int) -> int:
    """Return how many normal numbers one release takes."""
    return classes + classes * dim + dim * (dim + 1) // 2


def released_class_sums(
    x: Tensor, y: Tensor, allowed: Tensor, min_samples: int, multiplier: float, normal: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts, class sums and the triangle of Σ x xᵀ of classes that may be uploaded, with noise.

    `allowed` (classes,) is True where a class may be uploaded. Small classes are suppressed by the noisy counts that
    are uploaded, so the choice reveals nothing more; with noise and a minimum of 1 no class is suppressed.
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
    is_released = allowed if multiplier and min_samples <= 1 else counts >= min_samples
    _, sums, second = packed_class_sums(x, torch.where(is_released[y.clamp(min=0)], y, -1), classes)
    if multiplier:
        sums = add_noise(sums, std, on_sums.reshape(classes, dim))
        sums = torch.where(is_released[:, None], sums, 0.0)
        second = add_noise(second, std, on_second)
    return torch.where(is_released, counts, 0.0), sums, second


def pack_statistics(counts: Tensor, sums: Tensor, second: Tensor, max_samples: int) -> Tensors:
    """Return an upload of whole numbers, which add up exactly, of at most `max_samples` per client."""
    whole = {"sums": to_fixed_point(sums, max_samples), "moments": to_fixed_point(second, max_samples)}
    return {"counts": counts.to(torch.int32), **whole}


def add_uploads(uploads: Sequence[Tensors], keys: Collection[str]) -> Tensors:
    """Return the exact sums of packed statistics; in place, because clients may be many."""
    total = {key: torch.zeros_like(uploads[0][key], dtype=torch.long) for key in keys}
    for upload in uploads:
        for key, value in total.items():
            value += upload[key]
    return total


def class_means(upload: Tensors, max_samples: int) -> Tensor:
    """Return the (classes, dim) class means of packed statistics."""
    return from_fixed_point(upload["sums"], max_samples) / upload["counts"].clamp(min=1)[:, None]


def empty_prior(classes: int, dim: int) -> Tensors:
    """Return the prior and its discriminant before any upload: all zero."""
    rule = {"weight": torch.zeros(classes, dim), "bias": torch.zeros(classes)}
    prior = {"counts": torch.zeros(classes), "means": torch.zeros(classes, dim)}
    return {**prior, "scatter": torch.zeros(dim * (dim + 1) // 2), **rule}


def pooled_prior(total: Tensors, max_samples: int, shrinkage: float) -> Tensors:
    """Return the posterior of all samples under an uninformative prior, and its discriminant."""
    sums, triangle = (from_fixed_point(total[key], max_samples) for key in ("sums", "moments"))
    second, step = unpack(triangle, sums.shape[1]), fixed_point_step(max_samples)
    pooled = moments_from_sums(total["counts"].double(), sums, second, step)
    rule = fit_discriminant(pooled, ridge(pooled, shrinkage))
    moments = {"counts": pooled.counts, "means": pooled.means, "scatter": pack(pooled.scatter)}
    return {key: value.float() for key, value in {**moments, "weight": rule.weight, "bias": rule.bias}.items()}


def fit_client_discriminant(prior: Tensors, x: Tensor, y: Tensor, alpha: float, shrinkage: float) -> ClientDiscriminant:
    """Fit a client's discriminant by its posterior, in which the prior's samples weigh α."""
    if LOW_RANK_DIM_RATIO * len(x) <= x.shape[1] and shrinkage >= LOW_RANK_MIN_SHRINKAGE:
        return fit_low_rank(_basis(prior["counts"], prior["means"], prior["scatter"]), x, y, alpha, shrinkage)
    posterior = posterior_moments(_moments(prior["counts"], prior["means"], prior["scatter"]), x, y, alpha)
    rule = fit_discriminant(posterior, ridge(posterior, shrinkage))
    return ClientDiscriminant(posterior.counts, rule.weight, rule.bias, offset_products(posterior, rule, x, y))


def _moments(counts: Tensor, means: Tensor, scatter: Tensor) -> Moments:
    return Moments(counts, means, unpack(scatter, means.shape[1]))


@remember_latest  # one decomposition serves all clients of a process
def _basis(counts: Tensor, means: Tensor, scatter: Tensor) -> Basis:
    return eigenbasis(_moments(counts, means, scatter))
