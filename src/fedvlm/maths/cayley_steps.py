"""SGD on a head and an orthogonal map together, by exact gradients instead of autograd.

Same steps as `parts.sgd` on the cross-entropy of tau * (Q x) head^T, for many clients at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core import Client
from fedvlm.maths.cayley import (
    gradients,
    identity_like,
    inverse,
    join,
    skew_part,
    softmax_error,
    split,
)

REFRESH = 128  # steps after which the inverse is computed anew, against the drift of rounding


@dataclass(frozen=True)
class Pace:
    """How far a step goes."""

    rate: float  # η
    momentum: float
    decay: float
    tau: float  # τ

    @property
    def refresh(self) -> int:
        """Steps between two inverses; the map's own decay waits until then, being below 1e-5."""
        shrink = self.rate * self.decay
        return REFRESH if shrink * REFRESH <= 1e-5 else int(1e-5 / shrink)


def low_rank_pays(size: int, classes: int, batch: int, pace: Pace) -> bool:
    """Whether the inverse of blocks of this size should follow the steps (see walk_low_rank)."""
    tiny = pace.momentum <= 1e-3 and pace.refresh >= 16
    return tiny and 8 * min(classes, batch) <= size


def walk(head: Tensor, raw: Tensor, client: Client, pace: Pace) -> tuple[Tensor, Tensor]:
    """Walks every client's minibatches: head (clients, K, d), raw (clients, r, m, m), both new.

    A gradient has rank 2 min(K, B). Where that is small beside a block and momentum and decay are
    tiny (as in FedOT: 5e-4), the inverse follows each step by an update of that rank. A map comes
    back as its skew part.
    """
    if not low_rank_pays(raw.shape[-1], head.shape[-2], client.order.shape[-1], pace):
        return walk_directly(head, raw, client, pace)
    walked = [
        walk_low_rank(head[i], raw[i], client.x[i], client.y[i], client.order[i], pace)
        for i in range(len(raw))
    ]
    return torch.stack([w for w, _ in walked]), torch.stack([s for _, s in walked])


def walk_directly(head: Tensor, raw: Tensor, client: Client, pace: Pace) -> tuple[Tensor, Tensor]:
    """One inverse per step, all clients stacked: any momentum, any decay, any block size."""
    trained = [head.clone(), raw.clone()]
    speeds = [torch.zeros_like(value) for value in trained]
    clients = torch.arange(len(raw), device=raw.device)[:, None]
    for rows in client.order.unbind(1):
        real = rows >= 0
        active = real.any(1)[:, None, None]
        if not active.any():
            continue
        rows = rows.clamp(min=0)
        x, y = client.x[clients, rows], client.y[clients, rows].clamp(min=0)
        moves = gradients(trained[0], trained[1], x, y, real, pace.tau)
        for value, speed, gradient in zip(trained, speeds, moves, strict=True):
            now = active if value.ndim == 3 else active[..., None]
            new = gradient.add(value, alpha=pace.decay).add_(speed, alpha=pace.momentum)
            speed.copy_(torch.where(now, new, speed))
            value.sub_(torch.where(now, new, 0.0), alpha=pace.rate)
    return trained[0], trained[1]


def walk_low_rank(
    head: Tensor, raw: Tensor, x: Tensor, y: Tensor, order: Tensor, pace: Pace
) -> tuple[Tensor, Tensor]:
    """One client: head (K, d), raw (r, m, m), x (rows, d), y (rows,), order (steps, batch).

    R = (I + P)^-1 follows P by the Woodbury identity. With momentum μ, what a gradient will ever
    do to P is its first push times 1 / (1 - μ); R follows that sum at once, and `left`, `right`
    take back the μ-th part of the last push, which is yet to come. The parts before it weigh μ²
    and less, under the rounding of float32.
    """
    blocks, mu = raw.shape[0], pace.momentum
    head, skew = head.clone(), skew_part(raw)
    eye = identity_like(raw)
    speed = torch.zeros_like(head)
    push = pace.rate * pace.tau / (1 - mu)
    keep = 1 - pace.rate * pace.decay / (1 - mu)
    pushed = torch.zeros_like(skew)  # the sum of V^T Y since the last refresh
    last = left = right = None
    back, steps = inverse(eye + skew), 0

    def settle() -> Tensor:
        turned = skew * keep**steps
        return turned.sub_(pushed - pushed.mT, alpha=push * keep ** ((steps - 1) / 2))

    for rows in order:
        rows = rows[rows >= 0]
        if not len(rows):
            continue
        if steps == pace.refresh:
            skew, steps = settle(), 0
            pushed.zero_()
            back = inverse(eye + skew)
        h = x[rows]
        parts = split(head, blocks)
        toward = parts @ back.mT
        if left is not None and right is not None:
            toward = torch.baddbmm(toward, parts @ right.mT, left)
        whole = join(toward)
        logits = pace.tau * h @ (2 * whole - head).mT
        error = softmax_error(logits, y[rows], torch.ones_like(rows, dtype=torch.bool))
        narrow = len(head) <= len(rows)  # the smaller of K and B bears the rank
        thin = error.mT @ h if narrow else h
        v = toward if narrow else error @ toward
        parts = split(thin, blocks)
        u = parts @ back
        if left is not None and right is not None:
            u = torch.baddbmm(u, parts @ left.mT, right)
        shift = 2 * join(u) - thin
        pull = (shift if narrow else error.mT @ shift) * pace.tau
        speed = speed * mu + pull + pace.decay * head
        head -= pace.rate * speed

        pushed.baddbmm_(v.mT, u)
        factors = torch.cat([v, u], 1)  # L, (r, 2k, m): P moves by L^T J L
        right_of, left_of = factors @ back, factors @ back.mT
        small, swap = bend(right_of @ factors.mT, push)
        back.baddbmm_(left_of.mT, swap @ right_of, alpha=-1)
        if mu:
            last, left, right = (v, u), left_of, mu * (small @ swap) @ right_of
        steps += 1
    turned = settle()
    if last is not None:
        half = last[0].mT @ last[1]
        turned.add_(half - half.mT, alpha=mu * push)
    return head, turned


def bend(inner: Tensor, push: float) -> tuple[Tensor, Tensor]:
    """T = (I + J G)^-1 and T J for G = L R L^T (..., 2k, 2k) and J = push [[0, -I], [I, 0]]."""
    k = inner.shape[-1] // 2
    moved = torch.cat([-inner[..., k:, :], inner[..., :k, :]], -2)
    small = torch.linalg.inv(identity_like(inner) + push * moved)
    return small, push * torch.cat([small[..., k:], -small[..., :k]], -1)
