"""FedAvg on a linear head whose steps are corrected by what other clients' gradients were.

A variate is the mean gradient of a client's last round. Karimireddy et al., SCAFFOLD, ICML 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, Literal

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Client, Frozen, Tensors, TrainingTraits, register
from fedvlm.methods._heads import head_traits, initial_head
from fedvlm.methods.fedavg import FedAvg


@register
@dataclass(frozen=True)
class Scaffold:
    server_lr: float = 1.0  # η_g
    lr: float = 1e-3  # η_l; without momentum, which the variates have no account of
    weight_decay: float = 5e-4  # weight decay
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 50  # T
    head: Literal["text", "random"] = "text"

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        head = initial_head(self.head, frozen)
        zero = torch.zeros_like(head)
        return {"head": head, "variate": zero, "clients": torch.ones(())}, {"own variate": zero}

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        turn = (self.extra_gradient(shared, local, shared["head"]) * shared["head"]).sum()
        return parts.cross_entropy(self, frozen, shared, local, batch, start) + turn

    def extra_gradient(self, sent: Tensors, local: Tensors, head: Tensor) -> Tensor:
        return sent["variate"] - local["own variate"]

    def update(
        self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client, train: Any = parts.sgd
    ) -> tuple[Tensors, Tensors]:
        head = train(self, frozen, sent, local, client)[0]["head"]
        steps = (client.order >= 0).any(dim=-1).sum(-1).clamp(min=1)[..., None, None]  # K
        change = (sent["head"] - head) / (steps * self.lr) - sent["variate"]  # option II
        new_local = {"own variate": local["own variate"] + change}
        return {"head": head, "variate change": change}, new_local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        mean = parts.uniform_mean(self, uploads[0], uploads, weights, ids)
        head = torch.lerp(shared["head"], mean["head"], self.server_lr)
        variate = shared["variate"] + len(uploads) / shared["clients"] * mean["variate change"]
        return {**shared, "head": head, "variate": variate}

    name = "scaffold"
    traits = head_traits(
        training=TrainingTraits(memory=frozenset({"variate", "own variate", "clients"}), client_count="clients")
    )
    update_many = partialmethod(update, train=parts.regularised_head_sgd)
    predict, send, adapt = FedAvg.predict, parts.send_all, parts.no_adaptation
