"""SGD on a head and an orthogonal map together, by exact gradients instead of autograd.

Same steps as `parts.sgd` on the cross-entropy of tau * (Q x) head^T, for many clients at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core import Client
from fedvlm.maths.cayley import (
    followed,
    gradients,
    identity_like,
    inverse,
    join,
    lesson,
    skew_part,
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
    with torch.inference_mode():  # a tenth faster; what is stacked or cloned outside is ordinary
        if low_rank_pays(raw.shape[-1], head.shape[-2], client.order.shape[-1], pace):
            fields = (head, raw, client.x, client.y, client.order)
            walked = [walk_low_rank(*one, pace) for one in zip(*fields, strict=True)]
        else:
            walked = list(zip(*walk_directly(head, raw, client, pace), strict=True))
    return torch.stack([w for w, _ in walked]), torch.stack([s for _, s in walked])


def walk_directly(head: Tensor, raw: Tensor, client: Client, pace: Pace) -> tuple[Tensor, Tensor]:
    """The inverse of every step, all clients stacked: any momentum, any decay, any block size."""
    trained = [head.clone(), skew_part(raw)]
    speeds = [torch.zeros_like(value) for value in trained]
    clients = torch.arange(len(raw), device=raw.device)[:, None]
    real, rows = client.order >= 0, client.order.clamp(min=0)
    y = client.y[clients[..., None], rows].clamp(min=0)
    wanted, weight = lesson(y, real, head.shape[1], head.dtype)  # (clients, steps, B, ...)
    length = -pace.rate * real.any(-1).to(head.dtype)[..., None, None]
    eye = identity_like(raw)
    back = inverse(eye + trained[1])
    for number, step in enumerate(real.any(-1).any(0).nonzero()[:, 0].tolist()):
        x = pace.tau * client.x[clients, rows[:, step]]
        back = followed(back, eye + trained[1]) if number else back
        moves = gradients(trained[0], back, x, wanted[:, step], weight[:, step])
        for i, move in enumerate(moves):
            far = length[:, step] if move.ndim == 3 else length[:, step, None]
            new = move.add_(trained[i], alpha=pace.decay).add_(speeds[i], alpha=pace.momentum)
            trained[i].addcmul_(new, far)
            speeds[i] = torch.where(far == 0, speeds[i], new)
    return trained[0], trained[1]


def walk_low_rank(
    head: Tensor, raw: Tensor, x: Tensor, y: Tensor, order: Tensor, pace: Pace
) -> tuple[Tensor, Tensor]:
    """One client: head (K, d), raw (r, m, m), x (rows, d), y (rows,), order (steps, batch)."""
    order = order[(order >= 0).any(1)]
    head, skew = split(head, len(raw)).clone(), skew_part(raw)
    x = split(pace.tau * x, len(raw)).contiguous()
    speed = torch.zeros_like(head)
    tail: Tail | None = None
    for some in torch.split(order, pace.refresh) if len(order) else ():
        skew, tail = stride(head, speed, skew, tail, x, y, some, pace)
    if tail is not None:  # the last push has not done all it will
        skew = skew - pace.momentum * tail.push
    return join(head), skew


@dataclass(frozen=True)
class Tail:
    """What momentum has yet to add after a step: P is P̂ - μ push, R about R̂ + left^T right."""

    push: Tensor  # (r, m, m)
    left: Tensor  # (r, 2k, m)
    right: Tensor  # (r, 2k, m)


def stride(
    head: Tensor,  # (r, K, m)
    speed: Tensor,  # (r, K, m)
    skew: Tensor,
    tail: Tail | None,
    x: Tensor,  # (r, rows, m), times tau
    y: Tensor,
    order: Tensor,
    pace: Pace,
) -> tuple[Tensor, Tail | None]:
    """The steps between two inverses; changes head and speed in place, returns the new skew.

    The gradient is V^T U - U^T V with V of M and U of tau N (see cayley.gradients), so that P moves
    by L^T T with L = [V; U], T = [-U; V], V times the rate, and R = (I + P)^-1 follows by Woodbury:
    R - (R L^T) (I + T R L^T)^-1 (T R). With momentum μ, all that a gradient will ever do to P is
    its first push times 1 / (1 - μ); P and R take that at once (P̂, R̂), and the tail gives back the
    μ-th part of the last push. What is missing weighs μ² and less, under float32's rounding.
    """
    mu = pace.momentum
    back = inverse(identity_like(skew) + skew)
    rows, real = order.clamp(min=0), order >= 0
    target, share = lesson(y[rows].clamp(min=0), real, head.shape[1], x.dtype)
    narrow = head.shape[1] <= order.shape[1]  # the smaller of K and B bears the rank
    rank = 2 * min(head.shape[1], order.shape[1])
    eye = torch.eye(rank, dtype=x.dtype, device=x.device)
    pushes = []
    toward = head @ back.mT  # M
    sway = speed @ back.mT  # what M takes over from the last velocity
    left = right = None
    if tail is not None:
        left, right = tail.left, tail.right
        toward = toward.baddbmm(head @ right.mT, left)

    for batch, weight, wanted in zip(rows, share, target, strict=True):
        h = x.index_select(1, batch)
        logits = torch.bmm(h, torch.lerp(head, toward, 2).mT).sum(0)  # lerp: 2 M - W
        error = torch.addcmul(wanted, torch.softmax(logits, 1), weight)
        thin = error.mT @ h if narrow else h
        u = torch.bmm(thin, back)
        if left is not None and right is not None:
            u = u.baddbmm_(torch.bmm(thin, left.mT), right)
        shift = torch.lerp(thin, u, 2)
        v = (toward if narrow else error @ toward) * (pace.rate / (1 - mu))
        speed.mul_(mu).add_(shift if narrow else error.mT @ shift).add_(head, alpha=pace.decay)
        head.sub_(speed, alpha=pace.rate)
        # (2 u - thin) R^T is u, because R R^T = (R + R^T) / 2: the head's way to M is for free
        sway.mul_(mu).add_(u if narrow else error.mT @ u).add_(toward, alpha=pace.decay)
        toward = toward.sub(sway, alpha=pace.rate)
        if left is not None and right is not None:
            toward = toward.baddbmm_(torch.bmm(head, right.mT), left, alpha=-1)

        pushes.append((u, v))
        both = torch.cat([v, u], 1)
        left = torch.bmm(both, back.mT)
        right = torch.bmm(torch.cat([-u, v], 1), back)
        inner = torch.baddbmm(eye, right, both.mT)
        bent = torch.linalg.inv_ex(inner).inverse
        right = torch.bmm(bent, right)
        back.baddbmm_(left.mT, right, alpha=-1)
        owed = torch.baddbmm(right, bent, right, beta=0, alpha=mu)
        toward = toward.baddbmm(torch.bmm(head, (right - owed).mT), left, alpha=-1)
        right = owed

    u, v = (torch.cat(side, 1) for side in zip(*pushes, strict=True))
    half = u.mT @ v
    keep, steps = 1 - pace.rate * pace.decay / (1 - mu), len(pushes)
    skew = skew * keep**steps + keep ** ((steps - 1) / 2) * (half - half.mT)
    if not mu or left is None or right is None:
        return skew, None
    half = pushes[-1][0].mT @ pushes[-1][1]
    return skew, Tail(half - half.mT, left, right)
