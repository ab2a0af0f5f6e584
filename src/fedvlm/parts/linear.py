"""`parts.sgd` of a linear head for many clients at once: its gradient written out, no autograd."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedvlm.core import Client, Frozen, Tensors, schedule
from fedvlm.parts.walk import epoch_of
from fedvlm.tensors import full

# (clients, classes, dim) heads -> what is added to their gradients
Pull = Callable[[Tensor], Tensor | float]


# (clients, batch, dim) scaled rows, (clients, batch, 1) labels and weights, (clients, 1, 1) going
Step = tuple[Tensor, Tensor, Tensor, Tensor]


def steps(scale: float, clients: Client) -> Iterator[Step]:
    """The minibatches in which anyone has a row."""
    rows_of, labels = clients.x.flatten(0, 1), clients.y.clamp(min=0).flatten()
    first = torch.arange(len(clients.y))[:, None] * clients.y.shape[1]
    for rows in clients.order.unbind(1):
        real = rows >= 0
        count = real.sum(1)
        if not count.any():
            continue
        index = (rows.clamp(min=0) + first).flatten()
        batch = full(rows_of.index_select(0, index)).reshape(*rows.shape, -1)
        own = labels.index_select(0, index).reshape(*rows.shape, 1)
        share = (real / count.clamp(min=1)[:, None])[..., None]
        # scaled in autograd's order: the same rounding
        yield batch.mul_(scale), own, share, (count > 0)[:, None, None]


def slope_of(head: Tensor, batch: Tensor, own: Tensor, share: Tensor) -> Tensor:
    """(clients, classes, dim) the gradient of each client's mean cross-entropy."""
    off = torch.bmm(batch, head.mT).log_softmax(2).exp_()
    off.scatter_(2, own, off.gather(2, own) - 1)
    return torch.bmm(off.mul_(share).mT, batch)


@torch.no_grad()
def heads(self: Any, scale: float, head: Tensor, clients: Client, pull: Pull) -> Tensor:
    """(clients, classes, dim) after the steps of `parts.sgd` on `scale * x @ head.mT`'s loss."""
    pace = schedule(self)
    head = head.clone()
    speed = torch.zeros_like(head)
    for batch, own, share, going in steps(scale, clients):
        slope = slope_of(head, batch, own, share)
        slope = (slope + pull(head)).add_(head, alpha=pace.weight_decay)
        # A client without rows in this step keeps its head and its speed.
        speed = torch.where(going, pace.momentum * speed + slope, speed) if pace.momentum else slope
        head.sub_(torch.where(going, speed, 0.0), alpha=pace.lr)
    return head


@torch.no_grad()
def maps(self: Any, scale: float, first: Tensor, head: Tensor, clients: Client) -> Tensor:
    """(clients, dim, dim) after the steps of `parts.sgd` on `scale * x @ map.mT @ head.mT`'s loss.

    A gradient is headᵀ times one of the classes' rows, so that the map is a part of the first one
    and headᵀ times what was added: each step costs as much as one of a head.
    """
    pace = schedule(self)
    begun, square = torch.bmm(head, first), torch.bmm(head, head.mT)
    part = begun.new_ones(len(head), 1, 1)  # of the first map that is left
    added, part_speed, added_speed = torch.zeros_like(head), 0 * part, torch.zeros_like(head)
    for batch, own, share, going in steps(scale, clients):
        slope = slope_of(part * begun + torch.bmm(square, added), batch, own, share)
        faster = pace.momentum * part_speed + pace.weight_decay * part
        part_speed = torch.where(going, faster, part_speed)
        faster = pace.momentum * added_speed + slope + pace.weight_decay * added
        added_speed = torch.where(going, faster, added_speed)
        far = pace.lr * going
        part, added = part - far * part_speed, added - far * added_speed
    return torch.baddbmm(part * first, head.mT, added)


def map_sgd(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """update_many: every client's `parts.sgd` of a local `head` over a shared `map`, in turns."""
    epochs = epoch_of(self, clients.order)

    def turn(key: str) -> Client:
        mine = self.in_turn(key, epochs)[..., None]
        return replace(clients, order=torch.where(mine, clients.order, -1))

    seen = torch.bmm(full(clients.x), sent["map"].mT)
    head = heads(self, frozen.scale, local["head"], replace(turn("head"), x=seen), lambda _: 0.0)
    return {"map": maps(self, frozen.scale, sent["map"], head, turn("map"))}, {"head": head}


def head_sgd(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """update_many: every client's `parts.sgd` where a shared `head` is all that is trained."""
    return {"head": heads(self, frozen.scale, sent["head"], clients, lambda head: 0.0)}, local


def pulled_sgd(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """update_many: as `head_sgd`, where the loss has another part, whose gradient is `pull`."""

    def pull(head: Tensor) -> Tensor:
        return torch.as_tensor(self.pull(sent, local, head))

    return {"head": heads(self, frozen.scale, sent["head"], clients, pull)}, local
