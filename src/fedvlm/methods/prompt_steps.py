"""How many clients' prompts are trained together: stacked, with one backward pass for all of them.

The text tower takes prompts with leading axes, so nothing has to be vmapped, and a step of small
prompts costs little more for several clients than for one.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Client, Frozen, Tensors
from fedvlm.tensors import full

AT_ONCE = 1 << 19  # numbers in a layer of the tower; the backward pass keeps a few hundred as many


def sgd_together(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """update_many: `parts.sgd` of stacked clients, for a `loss` that sums over a leading axis."""
    tower = frozen.text_tower
    assert tower is not None  # promised by `needs`
    tokens = 1 + tower.room + tower.suffixes[..., 0].numel()
    size = max(1, AT_ONCE // (2 * tokens * tower.width))
    count = clients.order.shape[0]
    done = []
    for first in range(0, count, size):
        some = slice(first, first + size)
        done.append(
            _walk(
                self,
                frozen,
                {key: value[some] for key, value in sent.items()},
                {key: value[some] for key, value in local.items()},
                Client(*(getattr(clients, part.name)[some] for part in fields(Client))),
            )
        )
    joined = ({key: torch.cat([one[i][key] for one in done]) for key in done[0][i]} for i in (0, 1))
    return next(joined), next(joined)


def _walk(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    now = {**sent, **local}
    trained = [key for key in now if key not in self.memory]
    step, states, none = parts.sgd_step(self), dict[str, Tensors](), torch.zeros(())
    for index in range(clients.order.shape[1]):
        batch = _minibatches(clients, index)
        active = batch.real.any(dim=1)
        now |= {key: now[key].detach().requires_grad_() for key in trained}
        shared, own = ({key: now[key] for key in kind} for kind in (sent, local))
        loss = self.loss(frozen, shared, own, batch, sent)
        slopes = torch.autograd.grad(loss, [now[key] for key in trained])
        for key, slope in zip(trained, slopes, strict=True):
            state = states.get(key, {})
            moved, after = step(now[key].detach(), slope, state)
            now[key] = _where(active, moved, now[key].detach())
            states[key] = {
                name: _where(active, new, state.get(name, none)) for name, new in after.items()
            }
    return {key: now[key] for key in sent}, {key: now[key] for key in local}


def _minibatches(clients: Client, step: int) -> Batch:
    rows = clients.order[:, step]
    who = torch.arange(len(rows))[:, None]
    taken = rows.clamp(min=0)
    others = clients.reference[:, :0]
    return Batch(full(clients.x[who, taken]), clients.y[who, taken].clamp(min=0), rows >= 0, others)


def _where(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old)
