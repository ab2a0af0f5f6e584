"""FedOT without the constraint: every client's local map is any linear one, from the identity.

FedLT, or FedOT(-o), in the ablation of Kong et al. (see fedot).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, register
from fedvlm.maths import orthogonal
from fedvlm.methods._heads import head_traits, initial_head


@register
@dataclass(frozen=True)
class FedLT:
    tau: float = 100.0  # τ
    lr: float = 5e-5  # η
    momentum: float = 5e-4
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 200  # T
    head: Literal["text", "random"] = "text"

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {"head": initial_head(self.head, frozen)}, {"map": torch.eye(frozen.dim)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return self.tau * normalize(x @ local["map"].mT, dim=-1) @ sent["head"].mT

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        """The numbers of the paper's tables for one client's map."""
        return {
            "condition number": orthogonal.condition_number(local["map"]),
            "orthogonality error": orthogonal.orthogonality_error(local["map"]),
            "degrees of freedom": frozen.dim**2,
        }

    def condition(self, local: Tensors) -> float:
        """κ of the bound on gradient differences."""
        return orthogonal.condition_number(local["map"])

    name = "fedlt"
    traits = head_traits()
    loss = parts.cross_entropy
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
