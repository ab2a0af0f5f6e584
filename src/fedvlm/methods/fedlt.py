"""FedLT: FedOT without the constraint, with any linear map at every client, starting from the identity.

FedLT, or FedOT(-o), in the ablation of Kong et al. (see fedot).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, register
from fedvlm.maths import orthogonal
from fedvlm.methods._heads import initial_head
from fedvlm.methods._settings import FedOTSettings, head_traits


@register
@dataclass(frozen=True)
class FedLT(FedOTSettings):
    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {"head": initial_head(self.head, frozen)}, {"map": torch.eye(frozen.dim)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return self.tau * normalize(x @ local["map"].mT, dim=-1) @ sent["head"].mT

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        """Return the numbers of the paper's tables for one client's map."""
        out = {"condition number": orthogonal.condition_number(local["map"]), "degrees of freedom": frozen.dim**2}
        return out | {"orthogonality error": orthogonal.orthogonality_error(local["map"])}

    def condition(self, local: Tensors) -> float:
        """Return κ of the bound on gradient differences."""
        return orthogonal.condition_number(local["map"])

    name = "fedlt"
    traits = head_traits()
    loss = parts.cross_entropy
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
