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

    lr: float  # η
    momentum: float
    weight_decay: float
    tau: float  # τ

    @property
    def refresh(self) -> int:
        """Steps between two inverses; the map's own decay waits until then, being below 1e-5."""
        shrink = self.lr * self.weight_decay
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
    length = -pace.lr * real.any(-1).to(head.dtype)[..., None, None]
    eye = identity_like(raw)
    back = inverse(eye + trained[1])
    for number, step in enumerate(real.any(-1).any(0).nonzero()[:, 0].tolist()):
        x = pace.tau * full(client.x[clients, rows[:, step]])
        back = followed(back, eye + trained[1]) if number else back
        moves = gradients(trained[0], back, x, wanted[:, step], weight[:, step])
        for i, move in enumerate(moves):
            far = length[:, step] if move.ndim == 3 else length[:, step, None]
            new = move.add_(trained[i], alpha=pace.weight_decay).add_(
                speeds[i], alpha=pace.momentum
            )
            trained[i].addcmul_(new, far)
            speeds[i] = torch.where(far == 0, speeds[i], new)
    return trained[0], trained[1]


def walk_low_rank(
    head: Tensor, raw: Tensor, x: Tensor, y: Tensor, order: Tensor, pace: Pace
) -> tuple[Tensor, Tensor]:
    """One client: head (K, d), raw (r, m, m), x (rows, d), y (rows,), order (steps, batch)."""
    order = order[(order >= 0).any(1)]
    narrow = head.shape[0] <= order.shape[1]  # the smaller of K and B bears the rank
    both = torch.stack([split(head, len(raw))] * (1 + narrow))
    speeds, skew, last = torch.zeros_like(both), odd(raw).div_(2), None
    pieces = torch.split(order, pace.refresh) if len(order) else ()
    for number, some in enumerate(pieces, 1):
        over = number == len(pieces)
        speeds, last = stride(both, speeds, skew, last, x, y, some, pace, over)
    return join(both[0]), skew


def odd(blocks: Tensor) -> Tensor:
    """X - X^T of (r, m, m), exactly skew; a copy of one transposed block is 3 times faster."""
    return torch.stack([one - one.mT.contiguous() for one in blocks])


class Follower:
    """R = (I + P)^-1 that follows P's steps L^T J L, with L = [V; U] and J = [0, -I; I, 0].

    By Woodbury it is R - (R L^T) B (L R) after a step, with B = (L R L^T - J)^-1. L R waits for the
    next step, where one product with R gives it together with the next U: it is not needed before,
    for z R after the step is (z - z (R L^T) B L) R.

    With momentum μ, all that a gradient will ever do to P is its first push times 1 / (1 - μ); P
    and R take that at once, and the tail gives back the μ-th part of the last push: the true R has
    B + μ B J B in place of B. What is missing weighs μ² and less, under float32's rounding.
    """

    def __init__(self, skew: Tensor, rank: int, last: Tensor | None, momentum: float) -> None:
        self.rank, self.momentum = rank, momentum
        self.back = inverse(plus_one(skew))
        eye = skew.new_zeros(2 * rank, 2 * rank).fill_diagonal_(1)
        self.flip = torch.cat([-eye[rank:], eye[:rank]])  # J
        self.operands = skew.new_zeros(len(skew), 3 * rank, skew.shape[-1])
        self.first, self.factors = self.operands[:, :rank], self.operands[:, rank:]  # L
        self.sides = torch.unflatten(self.factors, 1, (2, rank)).transpose(0, 1)  # V and U
        if last is not None:
            self.sides.copy_(last)
        self.left = torch.bmm(self.factors, self.back.mT)  # R L^T
        self.late = momentum * self.flip.expand(len(skew), -1, -1)  # B of R less that of the true R
        self.bend, self.bent = torch.zeros_like(self.late), -self.late  # B of R, B of the true R

    def settle(self) -> None:
        """What P took in the last step is made ready for R."""
        self.left = torch.bmm(self.factors, self.back.mT)
        crossed = torch.baddbmm(self.flip, self.factors, self.left.mT, beta=-1)
        self.bend = bend = small_inverse(crossed)
        self.late = torch.baddbmm(bend, bend, self.flip @ bend, beta=0, alpha=-self.momentum)
        self.bent = bend - self.late

    def ahead(self, toward: Tensor) -> None:
        """W R^T of the R before the last step becomes that of the true R after it."""
        onto = torch.bmm(torch.bmm(toward, self.factors.mT), self.bent.mT)
        toward.baddbmm_(onto, self.left, alpha=-1)

    def right(self, thin: Tensor) -> Tensor:
        """U: rows times the true R; R itself takes the last step."""
        onto = torch.bmm(torch.bmm(thin, self.left.mT), self.bent)
        torch.baddbmm(thin, onto, self.factors, alpha=-1, out=self.first)
        found = torch.bmm(self.operands, self.back)
        self.seen = found[:, self.rank :]  # L R
        self.back.baddbmm_(self.left.mT, torch.bmm(self.bend, self.seen), alpha=-1)
        return found[:, : self.rank]

    def owe(self, turned: Tensor, rows: Tensor, sign: int) -> None:
        """Adds to rows times R^T (sign 1) what they have by the true R, or takes it away (-1)."""
        onto = torch.bmm(torch.bmm(rows, self.seen.mT), self.late.mT)
        turned.baddbmm_(onto, self.left, alpha=sign)


def stride(
    both: Tensor,  # (2, r, K, m): W and M = W R^T; where K > B it is W alone
    speeds: Tensor,  # of both
    skew: Tensor,
    last: Tensor | None,  # (2, r, k, m): V and U of the step before
    x: Tensor,
    y: Tensor,
    order: Tensor,
    pace: Pace,
    over: bool,
) -> tuple[Tensor, Tensor]:
    """The steps between two inverses; changes both and skew in place, returns speeds and last.

    The gradient is V^T U - U^T V with V of M and U of tau N (see cayley.gradients), and V times the
    rate is what P takes at once. The smaller of K and B bears the rank: M follows W where that is
    K, else the rows of the minibatch are turned instead of W.
    """
    rows, real = order.clamp(min=0), order >= 0
    target, share = lesson(y[rows].clamp(min=0), real, both.shape[2], both.dtype)
    seen = full(x.index_select(0, rows.flatten())).mul_(pace.tau)  # 6 times faster than x[rows]
    steps = split(seen.reshape(*rows.shape, -1), len(skew)).contiguous()  # (steps, r, B, m)
    rank, far = min(both.shape[2], order.shape[1]), pace.lr / (1 - pace.momentum)
    taken = skew.new_empty(2, len(skew), len(order), rank, skew.shape[-1])  # V and U of all steps
    follower = Follower(skew, rank, last, pace.momentum)
    back, sides, head = follower.back, follower.sides, both[0]
    if narrow := len(both) == 2:
        toward = both[1]
        both[1], speeds[1] = head @ back.mT, speeds[0] @ back.mT

    for number, (h, weight, wanted) in enumerate(zip(steps, share, target, strict=True)):
        if number:
            follower.settle()
        if narrow:
            follower.ahead(toward)
            logits = torch.bmm(h, torch.lerp(head, toward, 2).mT).sum(0)  # lerp: 2 M - W
            error = torch.addcmul(wanted, torch.softmax(logits, 1), weight)
            thin = error.mT @ h
            u = follower.right(thin)
            torch.mul(toward, far, out=sides[0])
            # (2 u - thin) R^T is u, because R R^T = (R + R^T) / 2: W's way to M is for free
            moves = torch.stack([torch.lerp(thin, u, 2), u])
        else:
            u = follower.right(h)
            turned = torch.lerp(h, u, 2)  # h Q
            logits = torch.bmm(turned, head.mT).sum(0)
            error = torch.addcmul(wanted, torch.softmax(logits, 1), weight)
            pulled = (error @ head).mul_(far)
            torch.bmm(pulled, back.mT, out=sides[0])
            follower.owe(sides[0], pulled, 1)
            moves = (error.mT @ turned)[None]
        sides[1] = u
        taken[:, :, number] = sides
        speeds = moves.add_(speeds, alpha=pace.momentum).add_(both, alpha=pace.weight_decay)
        both.sub_(speeds, alpha=pace.lr)
        if narrow:
            follower.owe(toward, head, -1)

    last = sides.clone()
    if over:  # the last push has not done all it will
        taken[0][:, -1].mul_(1 - pace.momentum)
    v, u = taken.flatten(2, 3)
    keep = 1 - far * pace.weight_decay
    skew.mul_(keep ** len(order)).add_(odd(u.mT @ v), alpha=keep ** ((len(order) - 1) / 2))
    return speeds, last
