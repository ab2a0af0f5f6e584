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
    """One client: head (K, d), raw (r, m, m), x (rows, d), y (rows,), order (steps, batch)."""
    order = order[(order >= 0).any(1)]
    head, skew = head.clone(), skew_part(raw)
    speed = torch.zeros_like(head)
    tail: Tail | None = None
    for some in order.split(pace.refresh):
        skew, tail = stride(head, speed, skew, tail, x, y, some, pace)
    if tail is not None:  # the last push has not done all it will
        skew = skew + pace.momentum * tail.push
    return head, skew


@dataclass(frozen=True)
class Tail:
    """What momentum has still to add after a step: P is P̂ + μ push, R about R̂ + left^T right."""

    push: Tensor  # (r, m, m)
    left: Tensor  # (r, 2k, m)
    right: Tensor  # (r, 2k, m)


def stride(
    head: Tensor,
    speed: Tensor,
    skew: Tensor,
    tail: Tail | None,
    x: Tensor,
    y: Tensor,
    order: Tensor,
    pace: Pace,
) -> tuple[Tensor, Tail | None]:
    """The steps between two inverses; changes head and speed in place, returns the new skew.

    R = (I + P)^-1 follows P by the Woodbury identity. With momentum μ, all that a gradient will
    ever do to P is its first push times 1 / (1 - μ); skew and R take that at once (P̂, R̂), and the
    tail gives back the μ-th part of the last push, which is yet to come. What is missing weighs μ²
    and less, under the rounding of float32.
    """
    blocks, mu = skew.shape[0], pace.momentum
    push = pace.rate * pace.tau / (1 - mu)
    back = inverse(identity_like(skew) + skew)
    real = order >= 0
    rows = order.clamp(min=0)
    share = (real.to(x.dtype) / real.sum(1, keepdim=True))[..., None]  # (steps, B, 1)
    target = share * torch.nn.functional.one_hot(y[rows].clamp(min=0), len(head))
    narrow = len(head) <= order.shape[1]  # the smaller of K and B bears the rank
    k = min(len(head), order.shape[1])
    pushes = []
    toward = split(head, blocks) @ back.mT  # M
    left = right = None
    if tail is not None:
        left, right = tail.left, tail.right
        toward = toward.baddbmm(split(head, blocks) @ right.mT, left)

    for step, batch in enumerate(rows):
        h = x[batch]
        logits = h @ (2 * join(toward) - head).mul_(pace.tau).mT
        error = torch.softmax(logits, 1).mul_(share[step]).sub_(target[step])
        thin = error.mT @ h if narrow else h  # (k, d)
        parts = split(thin, blocks)
        v, u = toward if narrow else error @ toward, parts @ back  # (r, k, m)
        if left is not None and right is not None:
            u = u.baddbmm_(parts @ left.mT, right)
        shift = 2 * join(u) - thin
        speed.mul_(mu).add_(shift if narrow else error.mT @ shift, alpha=pace.tau)
        speed.add_(head, alpha=pace.decay)
        head.sub_(speed, alpha=pace.rate)

        pushes.append((v, u))  # P moves by push (U^T V - V^T U) = L^T J L
        new = split(head, blocks)
        factors = torch.cat([v, u, new], 1)  # L and, for the next step, the head
        right_of, left_of = factors[:, : 2 * k] @ back, factors @ back.mT
        toward, left_of = left_of[:, 2 * k :], left_of[:, : 2 * k]
        small, bent = bend(right_of @ factors[:, : 2 * k].mT, push)
        back.baddbmm_(left_of.mT, bent @ right_of, alpha=-1)
        if mu:
            owed = mu * small @ bent
            left, right = left_of, owed @ right_of
            bent = bent - owed
        toward = toward.baddbmm(new @ right_of.mT, bent.mT @ left_of, alpha=-1)

    v, u = (torch.cat(side, 1) for side in zip(*pushes, strict=True))
    half = u.mT @ v
    keep, steps = 1 - pace.rate * pace.decay / (1 - mu), len(pushes)
    skew = skew * keep**steps + push * keep ** ((steps - 1) / 2) * (half - half.mT)
    if left is None or right is None:
        return skew, None
    half = pushes[-1][0].mT @ pushes[-1][1]
    return skew, Tail(push * (half - half.mT), left, right)


def bend(inner: Tensor, push: float) -> tuple[Tensor, Tensor]:
    """T = (I + J G)^-1 and T J for G = L R L^T (..., 2k, 2k) and J = push [[0, -I], [I, 0]]."""
    k = inner.shape[-1] // 2
    moved = torch.cat([inner[..., k:, :] * -push, inner[..., :k, :] * push], -2)
    moved.diagonal(dim1=-2, dim2=-1).add_(1)
    small = torch.linalg.inv_ex(moved).inverse
    return small, torch.cat([small[..., k:] * push, small[..., :k] * -push], -1)
