"""FedAdapter: FedOT with a nonlinear local map, a residual bottleneck that starts as the identity.

FedAdapter in the ablation of Kong et al. (see fedot), who give neither its width nor its shape.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm import parts, seeds
from fedvlm.core import Frozen, Tensors, register
from fedvlm.core.schema import COUNT, ranged_field
from fedvlm.methods._heads import initial_head
from fedvlm.methods._settings import FedOTSettings, head_traits


@register
@dataclass(frozen=True)
class FedAdapter(FedOTSettings):
    width: int = ranged_field(128, COUNT)  # of the bottleneck

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        draw = torch.randn(self.width, frozen.dim, generator=seeds.generator("adapter", frozen.seed))
        local = {
            "down": draw * frozen.dim**-0.5,  # V
            "up": torch.zeros(frozen.dim, self.width),  # U, zero so that an unseen client has I
        }
        return {"head": initial_head(self.head, frozen)}, local

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        adapted = x + torch.relu(x @ local["down"].mT) @ local["up"].mT
        return self.tau * normalize(adapted, dim=-1) @ sent["head"].mT

    name = "fedadapter"
    traits = head_traits()
    loss = parts.cross_entropy
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
