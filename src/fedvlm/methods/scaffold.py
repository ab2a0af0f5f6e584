"""FedAvg on a linear head whose steps are corrected by what other clients' gradients were.

A client's variate is the mean gradient of its last round, the shared one the mean of all clients'.
Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated learning, ICML 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Client, Frozen, Tensors, register
from fedvlm.methods._head import first_head, head_traits
from fedvlm.methods.fedavg import FedAvg


@register
@dataclass(frozen=True)
class Scaffold:
    server_rate: float = 1.0  # η_g
    rate: float = 1e-3  # η_l; without momentum, which the variates have no account of
    decay: float = 5e-4  # weight decay
    batch: int = 32  # B
    epochs: int = 1  # E
    rounds: int = 50  # T
    head: Literal["text", "random"] = "text"

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        head = first_head(self.head, frozen)
        zero, one = torch.zeros_like(head), torch.ones(())
        return {"head": head, "variate": zero, "clients": one}, {"own variate": zero}

    def loss(
        self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors
    ) -> Tensor:
        turn = ((shared["variate"] - local["own variate"]) * shared["head"]).sum()
        return parts.cross_entropy(self, frozen, shared, local, batch, start) + turn

    def update(
        self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client
    ) -> tuple[Tensors, Tensors]:
        head = parts.sgd(self, frozen, sent, local, client)[0]["head"]
        steps = (client.order >= 0).any(dim=-1).sum().clamp(min=1)  # K
        change = (sent["head"] - head) / (steps * self.rate) - sent["variate"]  # option II
        after = local["own variate"] + change
        return {"head": head, "variate change": change}, {"own variate": after}

    def aggregate(
        self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]
    ) -> Tensors:
        mean = parts.uniform(self, uploads[0], uploads, weights, ids)
        part = len(uploads) / shared["clients"]  # |S|/N
        head = torch.lerp(shared["head"], mean["head"], self.server_rate)
        return {
            **shared,
            "head": head,
            "variate": shared["variate"] + part * mean["variate change"],
        }

    name = "scaffold"
    traits = head_traits(memory=frozenset({"variate", "own variate", "clients"}), clients="clients")
    predict, send, adapt = FedAvg.predict, parts.everything, parts.nothing
