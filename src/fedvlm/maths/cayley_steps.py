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
    plus_one,
    skew_part,
    small_inverse,
    split,
)
from fedvlm.tensors import full

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
        x = pace.tau * full(client.x[clients, rows[:, step]])
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
    both = torch.stack([split(head, len(raw))] * 2)
    speeds, skew, last = torch.zeros_like(both), odd(raw).div_(2), None
    pieces = torch.split(order, pace.refresh) if len(order) else ()
    for number, some in enumerate(pieces, 1):
        over = number == len(pieces)
        speeds, last = stride(both, speeds, skew, last, x, y, some, pace, over)
    return join(both[0]), skew


def odd(blocks: Tensor) -> Tensor:
    """X - X^T of (r, m, m), exactly skew; a copy of one transposed block is 3 times faster."""
    return torch.stack([one - one.mT.contiguous() for one in blocks])


def stride(
    both: Tensor,  # (2, r, K, m): W and M
    speeds: Tensor,  # (2, r, K, m) of both
    skew: Tensor,
    last: Tensor | None,  # (2, r, k, m): V and U of the step before
    x: Tensor,
    y: Tensor,
    order: Tensor,
    pace: Pace,
    over: bool,
) -> tuple[Tensor, Tensor]:
    """The steps between two inverses; changes both and skew in place, returns speeds and last.

    The gradient is V^T U - U^T V with V of M and U of tau N (see cayley.gradients), so that P moves
    by L^T J L with L = [V; U], J = [0, -I; I, 0] and V times the rate. R = (I + P)^-1 follows by
    Woodbury: R - (R L^T) B (L R) with B = (L R L^T - J)^-1. L R waits for the next step, where one
    product with R gives it together with the next U: it is not needed before, for z R after the
    step is (z - z (R L^T) B L) R.

    With momentum μ, all that a gradient will ever do to P is its first push times 1 / (1 - μ); P
    and R take that at once, and the tail gives back the μ-th part of the last push: for the true R
    there is B + μ B J B in place of B. What is missing weighs μ² and less, under float32's
    rounding.
    """
    mu, classes, batch = pace.momentum, both.shape[2], order.shape[1]
    narrow = classes <= batch  # the smaller of K and B bears the rank
    rank = min(classes, batch)
    rows, real = order.clamp(min=0), order >= 0
    target, share = lesson(y[rows].clamp(min=0), real, classes, both.dtype)
    steps = split(full(x[rows]).mul_(pace.tau), len(skew)).contiguous()  # (steps, r, B, m)

    eye = skew.new_zeros(2 * rank, 2 * rank).fill_diagonal_(1)
    flip = torch.cat([-eye[rank:], eye[:rank]])  # J
    operands = skew.new_zeros(len(skew), 3 * rank, skew.shape[-1])
    first, factors = operands[:, :rank], operands[:, rank:]  # what becomes U, and L
    sides = torch.unflatten(factors, 1, (2, rank)).transpose(0, 1)
    if last is not None:
        sides.copy_(last)
    back = inverse(plus_one(skew))
    head, toward = both
    both[1], speeds[1] = head @ back.mT, speeds[0] @ back.mT
    left = factors @ back.mT  # R L^T
    late = mu * flip.expand(len(skew), -1, -1)  # what the true R has yet to take
    bend, bent = torch.zeros_like(late), -late  # B, and B of the true R
    toward.baddbmm_(toward @ factors.mT @ bent.mT, left, alpha=-1)
    taken = skew.new_empty(2, len(skew), len(order), rank, skew.shape[-1])  # V and U of all steps

    for h, weight, wanted, kept in zip(steps, share, target, taken.unbind(2), strict=True):
        logits = torch.bmm(h, torch.lerp(head, toward, 2).mT).sum(0)  # lerp: 2 M - W
        error = torch.addcmul(wanted, torch.softmax(logits, 1), weight)
        thin = error.mT @ h if narrow else h
        onto = torch.bmm(torch.bmm(thin, left.mT), bent)
        torch.baddbmm(thin, onto, factors, alpha=-1, out=first)
        found = torch.bmm(operands, back)
        u, seen = found[:, :rank], found[:, rank:]
        back.baddbmm_(left.mT, torch.bmm(bend, seen), alpha=-1)
        torch.mul(toward if narrow else error @ toward, pace.rate / (1 - mu), out=factors[:, :rank])
        factors[:, rank:] = u
        kept.copy_(sides)
        # (2 u - thin) R^T is u, because R R^T = (R + R^T) / 2: the head's way to M is for free
        moves = torch.stack([torch.lerp(thin, u, 2), u])
        moves = moves if narrow else error.mT @ moves
        speeds = moves.add_(speeds, alpha=mu).add_(both, alpha=pace.decay)
        both.sub_(speeds, alpha=pace.rate)
        onto = torch.bmm(torch.bmm(head, seen.mT), late.mT)
        toward.baddbmm_(onto, left, alpha=-1)

        left = torch.bmm(factors, back.mT)
        bend = small_inverse(torch.baddbmm(flip, factors, left.mT, beta=-1))
        late = torch.baddbmm(bend, bend, flip @ bend, beta=0, alpha=-mu)
        bent = bend - late
        onto = torch.bmm(torch.bmm(toward, factors.mT), bent.mT)
        toward.baddbmm_(onto, left, alpha=-1)

    last = sides.clone()
    if over:  # the last push has not done all it will
        taken[0][:, -1].mul_(1 - mu)
    v, u = taken.flatten(2, 3)
    keep = 1 - pace.rate * pace.decay / (1 - mu)
    skew.mul_(keep ** len(order)).add_(odd(u.mT @ v), alpha=keep ** ((len(order) - 1) / 2))
    return speeds, last
