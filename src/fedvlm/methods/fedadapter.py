"""FedOT with a nonlinear local map: a residual bottleneck that starts as the identity.

FedAdapter in the ablation of Kong et al. (see fedot), who give neither its width nor its shape.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm import parts, seeds
from fedvlm.core import Frozen, Tensors, register
from fedvlm.methods._heads import head_traits, initial_head


@register
@dataclass(frozen=True)
class FedAdapter:
    width: int = 128  # of the bottleneck
    tau: float = 100.0  # τ
    lr: float = 5e-5  # η
    momentum: float = 5e-4
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 200  # T
    head: Literal["text", "random"] = "text"

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        draw = torch.randn(self.width, frozen.dim, generator=seeds.generator("adapter", frozen.seed))
        local = {
            "down": draw * frozen.dim**-0.5,  # V
            "up": torch.zeros(frozen.dim, self.width),  # U, zero so that an unseen client has I
        }
        return {"head": initial_head(self.head, frozen)}, local

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        turned = x + torch.relu(x @ local["down"].mT) @ local["up"].mT
        return self.tau * normalize(turned, dim=-1) @ sent["head"].mT

    name = "fedadapter"
    traits = head_traits()
    loss = parts.cross_entropy
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
