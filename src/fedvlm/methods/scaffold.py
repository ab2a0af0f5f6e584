"""SCAFFOLD: FedAvg on a linear head whose steps are corrected by control variates.

A variate is the mean gradient of a client's last round. Karimireddy et al., SCAFFOLD, ICML 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, ClassTraits, Client, Frozen, PrivacyTraits, Tensors, TrainingTraits, register
from fedvlm.methods._heads import initial_head
from fedvlm.methods._settings import HeadInit, LossSettings, head_traits
from fedvlm.methods.fedavg import FedAvg


@register
@dataclass(frozen=True)
class Scaffold(LossSettings):
    server_lr: float = 1.0  # η_g
    lr: float = 1e-3  # η_l; there is no momentum, because variates do not account for it
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 50  # T
    head: HeadInit = "text"  # initial head: text embeddings, or random

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        head = initial_head(self.head, frozen)
        zero = torch.zeros_like(head)
        return {"head": head, "variate": zero, "clients": torch.ones(())}, {"local variate": zero}

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        correction = (self.extra_gradient(shared, local, shared["head"]) * shared["head"]).sum()
        return parts.cross_entropy(self, frozen, shared, local, batch, start) + correction

    def extra_gradient(self, sent: Tensors, local: Tensors, head: Tensor) -> Tensor:
        return sent["variate"] - local["local variate"]

    def update(
        self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client, train: Any = parts.sgd
    ) -> tuple[Tensors, Tensors]:
        head = train(self, frozen, sent, local, client)[0]["head"]
        steps = (client.order >= 0).any(dim=-1).sum(-1).clamp(min=1)[..., None, None]  # K
        change = (sent["head"] - head) / (steps * self.lr) - sent["variate"]  # option II
        new_local = {"local variate": local["local variate"] + change}
        return {"head": head, "variate change": change}, new_local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        mean = parts.uniform_mean(self, uploads[0], uploads, weights, ids)
        head = torch.lerp(shared["head"], mean["head"], self.server_lr)
        variate = shared["variate"] + len(ids) / shared["clients"] * mean["variate change"]
        return {**shared, "head": head, "variate": variate}

    name = "scaffold"
    traits = head_traits(
        training=TrainingTraits(memory=frozenset({"variate", "local variate", "clients"}), client_count="clients"),
        classes=ClassTraits(multi_label=True),
        privacy=PrivacyTraits(upload_sum="clients"),  # `ids` are all clients whose uploads are in the sum
    )
    update_many = partialmethod(update, train=parts.regularised_head_sgd)
    predict, send, adapt = FedAvg.predict, parts.send_all, parts.no_adaptation
