"""`parts.adam` for many clients by torch's fused kernel: the same steps but for rounding.

Large tensors gain nothing from stacking clients, so clients go one by one; what is saved is the
copying of a functional optimiser, which costs more than the gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as fused_step

from fedvlm import tensors
from fedvlm.core import Client, Frozen, Schedule, Tensors, schedule
from fedvlm.parts.walk import Move, States, descend, moments, split_state


def adam(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """update_many: every client's `parts.adam`."""
    done = []
    for i in range(len(clients.y)):
        client = Client(*(value[i] for value in vars(clients).values()))
        given, own = ({key: value[i] for key, value in one.items()} for one in (sent, local))
        done.append(descend(self, frozen, given, own, client, in_place(self), eager=True))
    return tensors.stack([upload for upload, _ in done]), tensors.stack([own for _, own in done])


def in_place(self: Any) -> Move:
    """Steps on copies that are made before the first."""
    pace = schedule(self)
    begun = False

    @torch.no_grad()
    def move(trained: Tensors, slopes: Tensors, states: States, turns: Tensors) -> None:
        nonlocal begun
        if not begun:
            trained |= tensors.copy(trained)
            fresh = split_state(moments(trained))[1]
            states |= {key: tensors.copy(states[key] or fresh[key]) for key in trained}
            begun = True
        names = [key for key in trained if turns[key]]
        kept = ([states[key][name] for key in names] for name in ("mean", "square", "count"))
        adam_step(pace, [trained[key] for key in names], [slopes[key] for key in names], *kept)

    return move


def adam_step(
    pace: Schedule,
    values: list[Tensor],
    slopes: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    counts: list[Tensor],
) -> None:
    """One step of Adam on all values, in place."""
    fused_step(
        values,
        slopes,
        means,
        squares,
        [],
        counts,
        fused=True,
        amsgrad=False,
        beta1=pace.betas[0],
        beta2=pace.betas[1],
        lr=pace.lr,
        weight_decay=pace.weight_decay,
        eps=pace.eps,
        maximize=False,
    )
