"""Train orthogonal maps, made by the Cayley transform from skew blocks without building the d x d matrix.

A map of dimension d is a tensor (..., r, m, m) of r blocks of size m = d / r; leading axes are batches. Only the skew
part P = (S - S^T) / 2 of a block S counts, and Q = (I + P)(I - P)^-1 turns a column h into Q h. FedOT trains X with
P = (X - X^T) / 2 from X = I; the gradient in X is skew and weight decay shrinks the symmetric part independently, so
training S from 0 gives the same P.

`train_clients` takes the steps of `parts.sgd` on the cross-entropy of tau * (Q x) head^T for many clients, by exact
gradients and low-rank updates of an inverse, because that is many times faster than autograd.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.core import Client
from fedvlm.errors import SettingsError
from fedvlm.tensors import to_float32

LAPACK_MAX_SIZE = 64  # up to this size LAPACK inverts faster than block elimination
MAX_FOLLOW_ERROR = 0.1  # of |I - A R|: below it, iterating from R is faster than LAPACK
STEPS_PER_INVERSE = 128  # after which the inverse is computed anew, against the drift of rounding


def block_size(dim: int, blocks: int) -> int:
    """Return m = d / r; refuse a number of blocks that does not divide the dimension."""
    if blocks < 1 or dim % blocks:
        divisors = ", ".join(str(r) for r in range(1, dim + 1) if dim % r == 0)
        raise SettingsError(f"blocks = {blocks} does not divide the {dim} dimensions; choose one of {divisors}")
    return dim // blocks


def skew_part(raw: Tensor) -> Tensor:
    """Return P."""
    return (raw - raw.mT) / 2


def identity_like(blocks: Tensor) -> Tensor:
    """Return the (m, m) identity, which broadcasts against (..., m, m)."""
    return torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)


def add_identity(blocks: Tensor) -> Tensor:
    """Return I + P of blocks P."""
    out = blocks.clone()
    out.diagonal(dim1=-2, dim2=-1).add_(1)
    return out


def split(x: Tensor, blocks: int) -> Tensor:
    """Reshape (..., rows, d) to (..., r, rows, m)."""
    return x.reshape(*x.shape[:-1], blocks, -1).transpose(-3, -2)


def join(parts: Tensor) -> Tensor:
    """Reshape (..., r, rows, m) to (..., rows, d)."""
    return parts.transpose(-3, -2).flatten(-2)


def orthogonal(raw: Tensor) -> Tensor:
    """Return the orthogonal blocks Q (..., r, m, m); their factors commute, so one solve suffices."""
    skew = skew_part(raw)
    eye = identity_like(raw)
    blocks: Tensor = torch.linalg.solve(eye - skew, eye + skew)
    return blocks


def rotate(raw: Tensor, x: Tensor) -> Tensor:
    """Return (..., rows, d): every row h of x as Q h, from Q = 2 (I - P)^-1 - I."""
    parts = split(x, raw.shape[-3])
    denominator = identity_like(raw) - skew_part(raw)
    return join(2 * torch.linalg.solve(denominator, parts.mT).mT - parts)


def dense(blocks: Tensor) -> Tensor:
    """Return (..., 1, d, d): one block with the blocks on its diagonal."""
    *lead, r, m, _ = blocks.shape
    eye = torch.eye(r, dtype=blocks.dtype, device=blocks.device)
    spread = blocks[..., :, :, None, :] * eye[:, None, :, None]  # (..., r, m, r, m)
    return spread.reshape(*lead, 1, r * m, r * m)


def orthogonality_error(blocks: Tensor) -> float:
    """Return the largest entry of |Q^T Q - I|."""
    return (blocks.mT @ blocks - identity_like(blocks)).abs().max().item()


def condition_number(blocks: Tensor) -> float:
    """Return κ = σ_max / σ_min of the block-diagonal map."""
    values: Tensor = torch.linalg.svdvals(blocks.double())
    return (values.max() / values.min()).item()


def degrees_of_freedom(dim: int, blocks: int) -> int:
    """Return d (d/r - 1) / 2 of an orthogonal map in r blocks."""
    return dim * (block_size(dim, blocks) - 1) // 2


def inverse(a: Tensor) -> Tensor:
    """Return the (..., m, m) inverse of I + P with P skew, by block elimination without pivots.

    The symmetric part of I + P is I and that of every Schur complement is at least I, so no pivot is small; matrix
    products are 2 to 3 times faster than a pivoted inverse.
    """
    if a.shape[-1] <= LAPACK_MAX_SIZE:
        return small_inverse(a)
    out = torch.empty_like(a, memory_format=torch.contiguous_format)
    for matrix, result in zip(a.flatten(0, -3), out.flatten(0, -3), strict=True):
        eliminate(matrix, result)
    return out


def eliminate(a: Tensor, out: Tensor) -> None:
    """Write the inverse of one (m, m) matrix; its halves are inverted in place."""
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
    """Return the (..., m, m) inverse by LAPACK, which above 32 rows is faster from the right."""
    if a.shape[-1] <= LAPACK_MAX_SIZE // 2:
        result: Tensor = torch.linalg.inv_ex(a).inverse
        return result
    lu, pivots, _ = torch.linalg.lu_factor_ex(a)
    solved: Tensor = torch.linalg.lu_solve(lu, pivots, identity_like(a).expand_as(a), left=False)
    return solved


def update_inverse(old_inverse: Tensor, a: Tensor) -> Tensor:
    """Return the inverse of `a` from that of a nearby matrix: R (I + E + E²) with E = I - A R leaves E³.

    In small blocks its three products cost a fifth of an inverse; a large or distant matrix is inverted.
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
    """Return the exact gradients, in the head W and the skew blocks P, of the cross-entropy of (Q x) W^T.

    head (..., K, d), resolvent (..., r, m, m), x (..., B, d) unit-norm times tau; target and weight are those of
    `cross_entropy_terms`. With the resolvent R = (I + P)^-1, M = W R^T, the softmax error E, C = E^T X and N = C R they
    are 2 N - C and M^T N - N^T M (half of the gradient in a free P, as in X of P = (X - X^T) / 2); dividing Q h by its
    norm would change neither.
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
    """Return target (..., B, K) and weight (..., B, 1).

    softmax * weight + target is the gradient in the logits of the mean cross-entropy over real samples.
    """
    weight = (real.to(dtype) / real.sum(-1, keepdim=True).clamp(min=1))[..., None]
    return -weight * torch.nn.functional.one_hot(y, classes), weight


@dataclass(frozen=True)
class SgdStep:
    """The settings of a step, and the temperature of the logits."""

    lr: float  # η
    momentum: float
    weight_decay: float
    tau: float  # τ

    @property
    def refresh(self) -> int:
        """Return the steps between two inverses; weight decay of the map is applied then, being below 1e-5."""
        shrink = self.lr * self.weight_decay
        return STEPS_PER_INVERSE if shrink * STEPS_PER_INVERSE <= 1e-5 else int(1e-5 / shrink)


def is_low_rank_faster(size: int, classes: int, batch: int, sgd: SgdStep) -> bool:
    """Return whether low-rank updates of the inverse are faster for blocks of this size."""
    return sgd.momentum <= 1e-3 and sgd.refresh >= 16 and 8 * min(classes, batch) <= size


def train_clients(head: Tensor, raw: Tensor, client: Client, sgd: SgdStep) -> tuple[Tensor, Tensor]:
    """Train on every client's minibatches; return new heads (clients, K, d) and skew parts (clients, r, m, m).

    A gradient has rank 2 min(K, B). Where that is small beside a block and momentum and weight decay are tiny (in FedOT
    5e-4), each step updates the inverse by a matrix of that rank.
    """
    with torch.inference_mode():  # 10 % faster; the results are stacked outside of it
        if is_low_rank_faster(raw.shape[-1], head.shape[-2], client.order.shape[-1], sgd):
            fields = (head, raw, client.x, client.y, client.order)
            results = [train_low_rank(*client_tensors, sgd) for client_tensors in zip(*fields, strict=True)]
        else:
            results = list(zip(*train_stacked(head, raw, client, sgd), strict=True))
    return torch.stack([w for w, _ in results]), torch.stack([s for _, s in results])


def train_stacked(head: Tensor, raw: Tensor, client: Client, sgd: SgdStep) -> tuple[Tensor, Tensor]:
    """Invert at every step, with all clients stacked: for any momentum, weight decay and block size."""
    trained = [head.clone(), skew_part(raw)]
    velocities = [torch.zeros_like(value) for value in trained]
    clients = torch.arange(len(raw), device=raw.device)[:, None]
    real, rows = client.order >= 0, client.order.clamp(min=0)
    y = client.y[clients[..., None], rows].clamp(min=0)
    target, weight = cross_entropy_terms(y, real, head.shape[1], head.dtype)  # (clients, steps, B, ...)
    length = -sgd.lr * real.any(-1).to(head.dtype)[..., None, None]
    eye = identity_like(raw)
    resolvent = inverse(eye + trained[1])
    for number, step in enumerate(real.any(-1).any(0).nonzero()[:, 0].tolist()):
        x = sgd.tau * to_float32(client.x[clients, rows[:, step]])
        resolvent = update_inverse(resolvent, eye + trained[1]) if number else resolvent
        moves = gradients(trained[0], resolvent, x, target[:, step], weight[:, step])
        for i, move in enumerate(moves):
            step_size = length[:, step] if move.ndim == 3 else length[:, step, None]
            new = move.add_(trained[i], alpha=sgd.weight_decay).add_(velocities[i], alpha=sgd.momentum)
            trained[i].addcmul_(new, step_size)
            velocities[i] = torch.where(step_size == 0, velocities[i], new)
    return trained[0], trained[1]


def train_low_rank(
    head: Tensor, raw: Tensor, x: Tensor, y: Tensor, order: Tensor, sgd: SgdStep
) -> tuple[Tensor, Tensor]:
    """Train one client: head (K, d), raw (r, m, m), x (samples, d), y (samples,), order (steps, batch)."""
    order = order[(order >= 0).any(1)]
    narrow = head.shape[0] <= order.shape[1]  # the smaller of K and B is the rank
    heads = torch.stack([split(head, len(raw))] * (1 + narrow))
    state = LowRankState(heads, torch.zeros_like(heads), subtract_transpose(raw).div_(2), None)
    chunks = torch.split(order, sgd.refresh) if len(order) else ()
    for number, chunk in enumerate(chunks, 1):
        state = run_low_rank_steps(state, x, y, chunk, sgd, is_last=number == len(chunks))
    return join(heads[0]), state.skew


def subtract_transpose(blocks: Tensor) -> Tensor:
    """Return X - X^T of (r, m, m), exactly skew; block by block is 3 times faster."""
    return torch.stack([block - block.mT.contiguous() for block in blocks])


class ResolventTracker:
    """Update R = (I + P)^-1 by P's steps L^T J L, with L = [V; U] and J = [0, -I; I, 0].

    By Woodbury it is R - (R L^T) B (L R) after a step, with B = (L R L^T - J)^-1. L R is computed in the next step by
    one product with R, together with the next U: until then z R is (z - z (R L^T) B L) R.

    With momentum μ, the total effect of a gradient on P is its first one times 1 / (1 - μ). P and R take that at once,
    and the true R is corrected by the part μ of the last step that is still to come: it has B + μ B J B in place of B.
    The remaining error is of order μ², below the rounding of float32.
    """

    def __init__(self, skew: Tensor, rank: int, last: Tensor | None, momentum: float) -> None:
        self.rank, self.momentum = rank, momentum
        self.resolvent = inverse(add_identity(skew))
        eye = skew.new_zeros(2 * rank, 2 * rank).fill_diagonal_(1)
        self.flip = torch.cat([-eye[rank:], eye[:rank]])  # J
        self.operands = skew.new_zeros(len(skew), 3 * rank, skew.shape[-1])
        self.first, self.factors = self.operands[:, :rank], self.operands[:, rank:]  # L
        self.sides = torch.unflatten(self.factors, 1, (2, rank)).transpose(0, 1)  # V and U
        if last is not None:
            self.sides.copy_(last)
        self.left_products = torch.bmm(self.factors, self.resolvent.mT)  # R L^T
        self.momentum_core = momentum * self.flip.expand(len(skew), -1, -1)  # B of R minus that of the true R
        self.core, self.true_core = torch.zeros_like(self.momentum_core), -self.momentum_core  # B of R, B of the true R

    def prepare_update(self) -> None:
        """Compute B of the last step."""
        self.left_products = torch.bmm(self.factors, self.resolvent.mT)
        crossed = torch.baddbmm(self.flip, self.factors, self.left_products.mT, beta=-1)
        self.core = core = small_inverse(crossed)
        self.momentum_core = torch.baddbmm(core, core, self.flip @ core, beta=0, alpha=-self.momentum)
        self.true_core = core - self.momentum_core

    def update_head_product(self, head_product: Tensor) -> None:
        """Turn W R^T of the R before the last step into that of the true R after it."""
        onto = torch.bmm(torch.bmm(head_product, self.factors.mT), self.true_core.mT)
        head_product.baddbmm_(onto, self.left_products, alpha=-1)

    def multiply_and_update(self, factor: Tensor) -> Tensor:
        """Return U, the rows times the true R, and apply the last step to R."""
        onto = torch.bmm(torch.bmm(factor, self.left_products.mT), self.true_core)
        torch.baddbmm(factor, onto, self.factors, alpha=-1, out=self.first)
        products = torch.bmm(self.operands, self.resolvent)
        self.factor_products = products[:, self.rank :]  # L R
        self.resolvent.baddbmm_(self.left_products.mT, torch.bmm(self.core, self.factor_products), alpha=-1)
        return products[:, : self.rank]

    def correct_momentum(self, turned: Tensor, rows: Tensor, sign: int) -> None:
        """Add the momentum's correction to rows times R^T (sign 1), or remove it (-1)."""
        onto = torch.bmm(torch.bmm(rows, self.factor_products.mT), self.momentum_core.mT)
        turned.baddbmm_(onto, self.left_products, alpha=sign)


class LowRankState(NamedTuple):
    """What `run_low_rank_steps` continues from."""

    heads: Tensor  # (2, r, K, m): W and M = W R^T; only W where K > B
    velocities: Tensor  # of the heads
    skew: Tensor  # (r, m, m)
    factors: Tensor | None  # (2, r, k, m): V and U of the step before


def run_low_rank_steps(
    state: LowRankState, x: Tensor, y: Tensor, order: Tensor, sgd: SgdStep, is_last: bool
) -> LowRankState:
    """Take the steps between two inverses; heads and skew are changed in place.

    The gradient is V^T U - U^T V with V of M and U of tau N (see `gradients`). The smaller of K and B is the rank: if
    it is K, M is updated with W, else the samples of the minibatch are rotated instead of W.
    """
    heads, velocities, skew, last_factors = state
    rows, real = order.clamp(min=0), order >= 0
    target, sample_weights = cross_entropy_terms(y[rows].clamp(min=0), real, heads.shape[2], heads.dtype)
    samples = to_float32(x.index_select(0, rows.flatten())).mul_(sgd.tau)  # 6 times faster than x[rows]
    steps = split(samples.reshape(*rows.shape, -1), len(skew)).contiguous()  # (steps, r, B, m)
    rank, effective_lr = min(heads.shape[2], order.shape[1]), sgd.lr / (1 - sgd.momentum)
    updates = skew.new_empty(2, len(skew), len(order), rank, skew.shape[-1])  # V and U of all steps
    tracker = ResolventTracker(skew, rank, last_factors, sgd.momentum)
    resolvent, sides, head = tracker.resolvent, tracker.sides, heads[0]
    if narrow := len(heads) == 2:
        head_product = heads[1]
        heads[1], velocities[1] = head @ resolvent.mT, velocities[0] @ resolvent.mT

    for number, (h, weight, step_target) in enumerate(zip(steps, sample_weights, target, strict=True)):
        if number:
            tracker.prepare_update()
        if narrow:
            tracker.update_head_product(head_product)
            logits = torch.bmm(h, torch.lerp(head, head_product, 2).mT).sum(0)  # lerp: 2 M - W
            error = torch.addcmul(step_target, torch.softmax(logits, 1), weight)
            gradient_rows = error.mT @ h
            u = tracker.multiply_and_update(gradient_rows)
            torch.mul(head_product, effective_lr, out=sides[0])
            # (2 u - gradient_rows) R^T is u, because R R^T = (R + R^T) / 2: M's gradient comes for free
            moves = torch.stack([torch.lerp(gradient_rows, u, 2), u])
        else:
            u = tracker.multiply_and_update(h)
            turned_samples = torch.lerp(h, u, 2)  # h Q
            logits = torch.bmm(turned_samples, head.mT).sum(0)
            error = torch.addcmul(step_target, torch.softmax(logits, 1), weight)
            error_rows = (error @ head).mul_(effective_lr)
            torch.bmm(error_rows, resolvent.mT, out=sides[0])
            tracker.correct_momentum(sides[0], error_rows, 1)
            moves = (error.mT @ turned_samples)[None]
        sides[1] = u
        updates[:, :, number] = sides
        velocities = moves.add_(velocities, alpha=sgd.momentum).add_(heads, alpha=sgd.weight_decay)
        heads.sub_(velocities, alpha=sgd.lr)
        if narrow:
            tracker.correct_momentum(head_product, head, -1)

    factors = sides.clone()
    if is_last:  # momentum of the last step does not act any more
        updates[0][:, -1].mul_(1 - sgd.momentum)
    v, u = updates.flatten(2, 3)
    keep = 1 - effective_lr * sgd.weight_decay
    skew.mul_(keep ** len(order)).add_(subtract_transpose(u.mT @ v), alpha=keep ** ((len(order) - 1) / 2))
    return LowRankState(heads, velocities, skew, factors)
