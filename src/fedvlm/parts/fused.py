"""`parts.adam` for many clients by torch's fused kernel: the same steps but for rounding.

Large tensors gain nothing from stacking clients, so clients go one by one; what is saved is the
copying of a functional optimiser, which costs more than the gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as fused_step

from fedvlm import parts, tensors
from fedvlm.core import Client, Frozen, Tensors
from fedvlm.parts import join_state, minibatch, split_state


def adam(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """update_many: every client's `parts.adam`."""
    done = []
    for i in range(len(clients.y)):
        client = Client(*(value[i] for value in vars(clients).values()))
        mine = tensors.select(sent, i), tensors.select(local, i)
        done.append(_one(self, frozen, *mine, client))
    return tensors.stack([upload for upload, _ in done]), tensors.stack([own for _, own in done])


@torch.enable_grad()
def _one(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client
) -> tuple[Tensors, Tensors]:
    """One client's steps; `sent` and `local` are copies, and are worked on in place."""
    first, second = self.betas
    local, states = split_state(local)
    now = {**sent, **local}
    start = {key: value.clone() for key, value in sent.items()}
    memory = self.traits.memory
    names = [key for key in now if key not in memory]
    trained = [now[key].requires_grad_() for key in names]
    moments = states or split_state(parts.moments({key: now[key].detach() for key in names}))[1]
    means, squares, counts = (
        [moments[key][name] for key in names] for name in ("mean", "square", "count")
    )
    none: list[Tensor] = []
    for index in range(len(client.order)):
        batch = minibatch(client, index)
        if not batch.real.any():
            continue
        shared = {key: now[key] for key in sent}
        own = {key: now[key] for key in local}
        result = self.loss(frozen, shared, own, batch, start)
        loss, remembered = result if isinstance(result, tuple) else (result, {})
        slopes = torch.autograd.grad(loss, trained, materialize_grads=True)
        with torch.no_grad():
            fused_step(
                trained,
                list(slopes),
                means,
                squares,
                none,
                counts,
                fused=True,
                amsgrad=False,
                beta1=first,
                beta2=second,
                lr=self.rate,
                weight_decay=self.decay,
                eps=self.eps,
                maximize=False,
            )
        now |= remembered
    now = {key: value.detach() for key, value in now.items()}
    own = {key: now[key] for key in local}
    if states:
        own |= join_state(moments)
    return {key: now[key] for key in sent}, own
