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
from fedvlm.parts.walk import Move, States, adam_moments, split_state, train_minibatches


def adam(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
    """update_many: every client's `parts.adam`."""
    done = []
    for i in range(len(clients.y)):
        client = Client(*(value[i] for value in vars(clients).values()))
        client_sent, client_local = ({key: value[i] for key, value in stacked.items()} for stacked in (sent, local))
        done.append(train_minibatches(self, frozen, client_sent, client_local, client, fused_move(self), eager=True))
    return tensors.stack([upload for upload, _ in done]), tensors.stack([client_local for _, client_local in done])


def fused_move(self: Any) -> Move:
    """Steps on copies that are made before the first."""
    settings = schedule(self)
    is_started = False

    @torch.no_grad()
    def move(trained: Tensors, gradients: Tensors, states: States, turns: Tensors) -> None:
        nonlocal is_started
        if not is_started:
            trained |= tensors.copy(trained)
            initial_states = split_state(adam_moments(trained))[1]
            states |= {key: tensors.copy(states[key] or initial_states[key]) for key in trained}
            is_started = True
        names = [key for key in trained if turns[key]]
        optimizer_state = ([states[key][name] for key in names] for name in ("mean", "square", "count"))
        adam_step(settings, [trained[key] for key in names], [gradients[key] for key in names], *optimizer_state)

    return move


def adam_step(
    settings: Schedule,
    values: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    counts: list[Tensor],
) -> None:
    """One step of Adam on all values, in place."""
    fused_step(
        values,
        gradients,
        means,
        squares,
        [],
        counts,
        fused=True,
        amsgrad=False,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=False,
    )
