"""Gaussian classes of one common covariance: statistics that add up, posterior, discriminant.

Sums over rows are taken in float64; all else has the precision of the moments it is given. There
are no branches on values, so that engines may vmap it.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

NEVER = -1e4  # the logit of a class without a prototype: finite, and beaten by every other
BLOCK = 128  # columns of a product of which only a triangle is asked for
TINY = 1e-4  # scatter per row below which rows of a class count as one and the same


class Moments(NamedTuple):
    """What is known of the classes; `scatter` is summed over rows around their class mean."""

    counts: Tensor  # (classes,) rows, or the weight of rows
    means: Tensor  # (classes, dim), zero for a class without rows
    scatter: Tensor  # (dim, dim), positive semidefinite


def members(y: Tensor, classes: int) -> Tensor:
    """(rows, classes) 1 where a row is of a class; nothing in a row that is padding (-1)."""
    return (y[:, None] == torch.arange(classes, device=y.device)).double()


def withheld(y: Tensor, counts: Tensor, smallest: int) -> Tensor:
    """The labels without those of classes whose `counts` are below `smallest`."""
    return torch.where((counts < smallest)[y.clamp(min=0)], -1, y)


def raw(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, class sums and Σ x xᵀ: sums over rows, so clients' add up to those of all rows."""
    counts, sums, triangle = sums_over(x, y, classes)
    return counts, sums, unpack(triangle, x.shape[1])


def sums_over(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with the last as a triangle."""
    rows = x.double() * (y >= 0)[:, None]
    sums = rows.new_zeros(classes, x.shape[1]).index_add(0, y.clamp(min=0), rows)
    return members(y, classes).sum(0), sums, gram(rows)


def centred(counts: Tensor, sums: Tensor, second: Tensor, step: float = 0.0) -> Moments:
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


def moments(
    counts: Tensor, sums: Tensor, second: Tensor, centre: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Class means, and per row the scatter around them or a given `centre`; both are packed."""
    means = sums / counts.clamp(min=1)[:, None] * (counts > 0)[:, None]
    if centre is None:
        there = counts > 0  # a client may have few of all classes
        around = gram(means[there] * counts[there].sqrt()[:, None]).neg_().add_(second)
    else:
        cross = sums.mT @ centre
        around = second - pack(cross + cross.mT - (centre * counts[:, None]).mT @ centre)
    return means, around.div_(counts.sum().clamp(min=1))


def sums_of(counts: Tensor, means: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor]:
    """The sums, the second packed, that `moments` would say this of."""
    second = gram(means * counts.clamp(min=0).sqrt()[:, None]) + counts.sum() * scatter
    return means * counts[:, None], second


def posterior(prior: Moments, x: Tensor, y: Tensor, alpha: float) -> Moments:
    """The moments of own rows, with the prior's rows weighing α each: a sum of squares.

    κ_c = αN_c + n_c, m_c = (αN_c z̄_c + n_c z̄ᵏ_c)/κ_c, and
    S = αS_g + Σ (z - z̄ᵏ_c)(z - z̄ᵏ_c)ᵀ + Σ_c (αN_c n_c/κ_c)(z̄ᵏ_c - z̄_c)(z̄ᵏ_c - z̄_c)ᵀ.
    """
    x = x.to(prior.means.dtype)
    one_hot = members(y, len(prior.counts)).to(x.dtype)
    counts = one_hot.sum(0)
    own = (one_hot.mT @ x) / counts.clamp(min=1)[:, None]
    before = alpha * prior.counts
    total = before + counts
    safe = torch.where(total > 0, total, 1.0)
    means = (before[:, None] * prior.means + counts[:, None] * own) / safe[:, None]
    # Deviations from a class mean sum to 0, so what sets the mean apart may be added to each row:
    # a product over the rows is all, none over the classes.
    apart = (before / safe).sqrt()[:, None] * (own - prior.means)
    parts = (x + (apart - own)[y.clamp(min=0)]) * (y >= 0)[:, None]
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


def ridge(known: Moments, shrinkage: float) -> Tensor:
    """λ tr(S)/(ν - 1), as CLIP-GDA shrinks; where S says nothing (one shot), from the means."""
    return ridge_of(known.counts, offsets(known.counts, known.means)[1], trace(known), shrinkage)


def ridge_of(counts: Tensor, offset: Tensor, within: Tensor, shrinkage: float) -> Tensor:
    """The same by tr(S) and the class means around their mean."""
    between = (counts * offset.square().sum(-1)).sum()
    spread = torch.where(tells(counts, within), within, between)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return shrinkage * spread / (counts.sum() - 1).clamp(min=1)


def trace(known: Moments) -> Tensor:
    return known.scatter.diagonal(dim1=-2, dim2=-1).sum(-1)


def tells(counts: Tensor, within: Tensor) -> Tensor:
    """Whether a scatter of the trace `within` says anything."""
    return within > TINY * counts.sum()


def discriminant(known: Moments, ridge: Tensor) -> Discriminant:
    """g_c(z) = m_cᵀGz - ½m_cᵀGm_c, G = (ν + d + 2)(S + ridge I)⁻¹, up to what all classes share.

    The uniform prior is left out. A class without rows has weight 0 and the bias NEVER.
    """
    dim = known.means.shape[-1]
    there, offset, centre = offsets(known.counts, known.means)
    scatter = torch.where(tells(known.counts, trace(known)), known.scatter, 0.0)
    eye = torch.eye(dim, dtype=scatter.dtype, device=scatter.device)
    root = torch.linalg.cholesky_ex(scatter + ridge * eye)[0]
    scale = (known.counts.sum() + dim + 2).sqrt()
    white = scale * torch.linalg.solve_triangular(root, offset.mT, upper=False)
    weight = scale * torch.linalg.solve_triangular(root.mT, white, upper=True)
    bias = -(weight.mT @ centre) - white.square().sum(0) / 2
    return Discriminant(weight.mT, torch.where(there, bias, NEVER), centre, root, white.mT)


def offsets(counts: Tensor, means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which classes have rows, their means around the mean of means, and that one."""
    there = counts > 0
    centre = means.sum(0) / there.sum().clamp(min=1)
    return there, torch.where(there[:, None], means - centre, 0.0), centre


class Apart(NamedTuple):
    """Products by G, of rows less the mean of their class with them and with class means."""

    size: Tensor  # (rows,) of a row with itself
    cross: Tensor  # (rows, classes) with the class means around their mean
    between: Tensor  # (classes, classes) of these with each other


def left_out(known: Moments, rule: Discriminant, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """(rows, classes) logits of each row by the discriminant of all others, the ridge kept."""
    return without_each(apart(known, rule, x, y), known.counts, y, weight, x.shape[1])


def apart(known: Moments, rule: Discriminant, x: Tensor, y: Tensor) -> Apart:
    x = x.to(rule.root.dtype)
    scale = (known.counts.sum() + x.shape[1] + 2).sqrt()
    solved = torch.linalg.solve_triangular(rule.root, (x - rule.centre).mT, upper=False)
    offset = scale * solved.mT - rule.white[y.clamp(min=0)]  # in unit covariance
    white = rule.white
    return Apart(offset.square().sum(1), offset @ white.mT, white @ white.mT)


def without_each(apart: Apart, counts: Tensor, y: Tensor, weight: Tensor, dim: int) -> Tensor:
    """`left_out` by products: a row changes the scatter by rank one, and the mean of its class.

    `weight` (rows,) is what each counts in `counts`: 1 + α if the prior has it as well. The only
    row of a class leaves it without a prototype.
    """
    size, cross, between = apart
    weight, label = weight.to(size.dtype), y.clamp(min=0)
    scale = counts.sum() + dim + 2
    many = counts[label]
    left = many - weight
    alone = left < weight * 1e-6
    left = torch.where(alone, 1.0, left)
    pull = torch.where(alone, 0.0, weight / left)  # how far the class mean moves away
    drop = torch.where(alone, 0.0, weight * many / left) / scale
    gain = drop / (1 - drop * size).clamp(min=1e-9)  # Sherman-Morrison
    mine = cross.gather(1, label[:, None])[:, 0]
    reach = size + mine  # with the row itself
    dots, norms = cross + between[label], between.diagonal()
    logits = dots + (gain * reach)[:, None] * cross - (norms + gain[:, None] * cross.square()) / 2
    stretch = 1 + gain * size
    own = logits.gather(1, label[:, None])[:, 0]
    own = own - pull * stretch * reach + pull * stretch * mine - pull.square() * stretch * size / 2
    fewer = ((scale - weight) / scale)[:, None]
    is_own = members(label, len(counts)) > 0
    logits = fewer * torch.where(is_own, own[:, None], logits)
    gone = (counts <= 0) | (is_own & alone[:, None])
    return torch.where(gone, NEVER, logits)


@lru_cache(maxsize=8)
def _places(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the upper triangle lies in a square, and where a square finds itself in a triangle."""
    row, column = torch.triu_indices(dim, dim, device=device)
    where = torch.zeros(dim, dim, dtype=torch.long, device=device)
    where[row, column] = where[column, row] = torch.arange(len(row), device=device)
    return row * dim + column, where.reshape(-1)


@lru_cache(maxsize=8)
def _in_blocks(dim: int, device: torch.device) -> Tensor:
    """Where `gram` finds the triangle in its products, one after the other."""
    row, column = torch.triu_indices(dim, dim, device=device)
    first = row - row % BLOCK
    widths = dim - torch.arange(0, dim, BLOCK, device=device)
    before = (BLOCK * widths).cumsum(0) - BLOCK * widths
    out: Tensor = before[row // BLOCK] + (row - first) * (dim - first) + column - first
    return out


def gram(x: Tensor) -> Tensor:
    """xᵀx of (..., rows, dim) as `pack` has it, without most of what is below the diagonal."""
    dim = x.shape[-1]
    firsts = range(0, dim, BLOCK)
    blocks = [(x[..., i : i + BLOCK].mT @ x[..., i:]).flatten(-2) for i in firsts]
    out: Tensor = torch.cat(blocks, -1).index_select(-1, _in_blocks(dim, x.device))
    return out


def pack(square: Tensor) -> Tensor:
    """One triangle of a symmetric (..., dim, dim), row by row: (..., dim (dim + 1) / 2)."""
    return square.flatten(-2).index_select(-1, _places(square.shape[-1], square.device)[0])


def unpack(triangle: Tensor, dim: int) -> Tensor:
    whole = triangle.index_select(-1, _places(dim, triangle.device)[1])
    return whole.reshape(*triangle.shape[:-1], dim, dim)


def definite(square: Tensor) -> Tensor:
    """A sum of squares as it is; a lie, or numbers' medians, without what makes them none."""
    size = square.diagonal().abs().mean().clamp(min=torch.finfo(square.dtype).tiny)
    eye = torch.eye(len(square), dtype=square.dtype)
    if not int(torch.linalg.cholesky_ex(square + 1e-5 * size * eye).info):
        return square
    values, vectors = torch.linalg.eigh((square + square.mT) / 2)
    out: Tensor = (vectors * values.clamp(min=0)) @ vectors.mT
    return out


def quantum(most: int) -> float:
    """The step of a 32-bit fixed point that holds sums over `most` rows of unit norm."""
    return most / 2.0**31


def to_fixed(value: Tensor, most: int) -> Tensor:
    """int32 multiples of the quantum: they add up exactly, in any order and under a secure sum."""
    return (value.double() / quantum(most)).round().clamp(-(2**31), 2**31 - 1).to(torch.int32)


def from_fixed(value: Tensor, most: int) -> Tensor:
    return value.to(torch.float64, copy=True).mul_(quantum(most))
