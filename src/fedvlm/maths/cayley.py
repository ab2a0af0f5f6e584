"""Orthogonal maps from skew blocks by the Cayley transform, without building the d x d matrix.

A map of dimension d is a tensor (..., r, m, m) of r blocks of size m = d / r; leading axes are
batches. Only the skew part P = (S - S^T) / 2 of a block S counts, and Q = (I + P)(I - P)^-1 turns a
column h into Q h. FedOT trains X with P = (X - X^T) / 2 from X = I; the gradient in X is skew and
weight decay shrinks the symmetric part on its own, so training S from 0 takes the very same P.
"""

import torch
from torch import Tensor

from fedvlm.errors import SettingsError

LAPACK_MAX_SIZE = 64  # below this size LAPACK inverts faster than block elimination with matrix products
MAX_FOLLOW_ERROR = 0.1  # of |I - A R|: where products lead from R to the inverse of A faster than LAPACK


def block_size(dim: int, blocks: int) -> int:
    """m = d / r, or a refusal that lists the numbers of blocks that divide the dimension."""
    if blocks < 1 or dim % blocks:
        divisors = ", ".join(str(r) for r in range(1, dim + 1) if dim % r == 0)
        raise SettingsError(
            f"blocks = {blocks} does not divide the dimension {dim} of the embeddings; choose one of {divisors}"
        )
    return dim // blocks


def skew_part(raw: Tensor) -> Tensor:
    return (raw - raw.mT) / 2


def identity_like(blocks: Tensor) -> Tensor:
    """(m, m), which broadcasts against (..., m, m)."""
    return torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)


def add_identity(blocks: Tensor) -> Tensor:
    """I + P of blocks P."""
    out = blocks.clone()
    out.diagonal(dim1=-2, dim2=-1).add_(1)
    return out


def split(x: Tensor, blocks: int) -> Tensor:
    """(..., rows, d) -> (..., r, rows, m)"""
    return x.reshape(*x.shape[:-1], blocks, -1).transpose(-3, -2)


def join(parts: Tensor) -> Tensor:
    """(..., r, rows, m) -> (..., rows, d)"""
    return parts.transpose(-3, -2).flatten(-2)


def orthogonal(raw: Tensor) -> Tensor:
    """(..., r, m, m): the orthogonal blocks Q; the factors of Q commute, so one solve does."""
    skew = skew_part(raw)
    eye = identity_like(raw)
    turn: Tensor = torch.linalg.solve(eye - skew, eye + skew)
    return turn


def rotate(raw: Tensor, x: Tensor) -> Tensor:
    """(..., rows, d): every row h of x as Q h, from Q = 2 (I - P)^-1 - I."""
    parts = split(x, raw.shape[-3])
    denominator = identity_like(raw) - skew_part(raw)
    return join(2 * torch.linalg.solve(denominator, parts.mT).mT - parts)


def dense(blocks: Tensor) -> Tensor:
    """(..., 1, d, d): blocks on the diagonal of one."""
    *lead, r, m, _ = blocks.shape
    eye = torch.eye(r, dtype=blocks.dtype, device=blocks.device)
    spread = blocks[..., :, :, None, :] * eye[:, None, :, None]  # (..., r, m, r, m)
    return spread.reshape(*lead, 1, r * m, r * m)


def orthogonality_error(blocks: Tensor) -> float:
    """The largest entry of |Q^T Q - I|."""
    return (blocks.mT @ blocks - identity_like(blocks)).abs().max().item()


def condition_number(blocks: Tensor) -> float:
    """κ = σ_max / σ_min of the block-diagonal map."""
    values: Tensor = torch.linalg.svdvals(blocks.double())
    return (values.max() / values.min()).item()


def degrees_of_freedom(dim: int, blocks: int) -> int:
    """d (d/r - 1) / 2 of an orthogonal map in r blocks."""
    return dim * (block_size(dim, blocks) - 1) // 2


def inverse(a: Tensor) -> Tensor:
    """(..., m, m) inverse of I + P with P skew, by block elimination; no pivots are needed.

    The symmetric part of I + P is I and that of every Schur complement is at least I, so no
    pivot is ever small; matrix products are 2-3 times faster than a pivoted inverse.
    """
    if a.shape[-1] <= LAPACK_MAX_SIZE:
        return small_inverse(a)
    out = torch.empty_like(a, memory_format=torch.contiguous_format)
    for matrix, result in zip(a.flatten(0, -3), out.flatten(0, -3), strict=True):
        eliminate(matrix, result)
    return out


def eliminate(a: Tensor, out: Tensor) -> None:
    """Writes the inverse of one (m, m) matrix; its halves are inverted where they will stand."""
    midpoint = len(a) // 2
    if len(a) <= LAPACK_MAX_SIZE:
        out.copy_(small_inverse(a))
        return
    corner, rest = out[:midpoint, :midpoint], out[midpoint:, midpoint:]
    eliminate(a[:midpoint, :midpoint], corner)
    upper, lower = corner @ a[:midpoint, midpoint:], a[midpoint:, :midpoint] @ corner
    eliminate(torch.addmm(a[midpoint:, midpoint:], a[midpoint:, :midpoint], upper, alpha=-1), rest)
    for place, x, y in ((out[midpoint:, :midpoint], rest, lower), (out[:midpoint, midpoint:], upper, rest)):
        torch.addmm(place, x, y, beta=0, alpha=-1, out=place)
    corner.addmm_(upper, out[midpoint:, :midpoint], alpha=-1)


def small_inverse(a: Tensor) -> Tensor:
    """(..., m, m) inverse by LAPACK, which for more than 32 rows is faster from the right."""
    if a.shape[-1] <= LAPACK_MAX_SIZE // 2:
        result: Tensor = torch.linalg.inv_ex(a).inverse
        return result
    lu, pivots, _ = torch.linalg.lu_factor_ex(a)
    solved: Tensor = torch.linalg.lu_solve(lu, pivots, identity_like(a).expand_as(a), left=False)
    return solved


def update_inverse(old_inverse: Tensor, a: Tensor) -> Tensor:
    """The inverse of `a` from one of a matrix near by: R (I + E + E²), E = I - A R, leaves E³.

    In small blocks its three products cost a fifth of an inverse; a large matrix, or one that is
    not near, is inverted.
    """
    if a.shape[-1] > LAPACK_MAX_SIZE:
        return inverse(a)
    tolerance = torch.finfo(a.dtype).eps ** (1 / 3)
    residual = 1.0
    while residual > tolerance:
        error = identity_like(a) - a @ old_inverse
        residual = float(error.abs().sum(-1).max())
        if not residual <= MAX_FOLLOW_ERROR:
            return inverse(a)
        old_inverse = old_inverse + old_inverse @ (error + error @ error)
    return old_inverse


def gradients(head: Tensor, resolvent: Tensor, x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The exact gradients, in the head W and the skew blocks P, of the cross-entropy of (Q x) W^T.

    head (..., K, d), back (..., r, m, m), x (..., B, d) unit-norm times tau; wanted and weight are
    those of `lesson`. With R = (I + P)^-1 (`back`), M = W R^T, the softmax error E, C = E^T X and
    N = C R they are 2 N - C and M^T N - N^T M (half of what a free P would have, as X of
    P = (X - X^T) / 2 has); dividing Q h by its norm would change neither.
    """
    blocks = resolvent.shape[-3]
    turned_head = split(head, blocks) @ resolvent.mT  # M
    logits = x @ torch.lerp(head, join(turned_head), 2).mT  # lerp: 2 M - W, which is W Q
    error = torch.addcmul(target, torch.softmax(logits, -1), weight)
    error_product = error.mT @ x  # C
    turned_product = split(error_product, blocks) @ resolvent  # N
    product = turned_head.mT @ turned_product
    return torch.lerp(error_product, join(turned_product), 2), product - product.mT


def cross_entropy_terms(y: Tensor, real: Tensor, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(..., B, K) and (..., B, 1): the softmax times weight plus wanted is the gradient in the
    logits of the mean cross-entropy over the real rows."""
    weight = (real.to(dtype) / real.sum(-1, keepdim=True).clamp(min=1))[..., None]
    return -weight * torch.nn.functional.one_hot(y, classes), weight
