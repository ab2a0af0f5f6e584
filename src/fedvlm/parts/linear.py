"""`parts.sgd` of a linear head for many clients at once: its gradient written out, no autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedvlm.core import Client, Frozen, Tensors, schedule
from fedvlm.tensors import full

# (clients, classes, dim) heads -> what is added to their gradients
Pull = Callable[[Tensor], Tensor | float]


@torch.no_grad()
def heads(self: Any, scale: float, head: Tensor, clients: Client, pull: Pull) -> Tensor:
    """(clients, classes, dim) after the steps of `parts.sgd` on `scale * x @ head.mT`'s loss."""
    pace = schedule(self)
    head = head.clone()
    speed = torch.zeros_like(head)
    place = torch.arange(len(head))[:, None]
    for step in range(clients.order.shape[1]):
        rows = clients.order[:, step]
        real = rows >= 0
        count = real.sum(1)
        if not count.any():
            continue
        rows = rows.clamp(min=0)
        batch = full(clients.x[place, rows]).mul_(scale)  # in autograd's order: the same rounding
        off = torch.bmm(batch, head.mT).log_softmax(2).exp_()
        own = clients.y[place, rows].clamp(min=0)[..., None]
        off.scatter_(2, own, off.gather(2, own) - 1)
        off *= (real / count.clamp(min=1)[:, None])[..., None]
        slope = torch.bmm(off.mT, batch)
        slope = (slope + pull(head)).add_(head, alpha=pace.decay)
        going = (count > 0)[:, None, None]
        # A client without rows in this step keeps its head and its speed.
        speed = torch.where(going, pace.momentum * speed + slope, speed) if pace.momentum else slope
        head.sub_(torch.where(going, speed, 0.0), alpha=pace.rate)
    return head


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
