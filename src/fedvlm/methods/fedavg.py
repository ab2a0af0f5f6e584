"""One linear head, trained by every client on its own rows and averaged by rows each round.

McMahan et al., Communication-efficient learning of deep networks from decentralized data,
AISTATS 2017.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, register
from fedvlm.methods._heads import head_traits, initial_head


@register
@dataclass(frozen=True)
class FedAvg:
    lr: float = 1e-3  # η
    momentum: float = 0.0
    weight_decay: float = 5e-4  # weight decay
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 50  # T
    head: Literal["text", "random"] = "text"

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {"head": initial_head(self.head, frozen)}, {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return frozen.scale * x @ sent["head"].mT

    name = "fedavg"
    traits = head_traits()
    loss = parts.cross_entropy
    update_many = parts.head_sgd
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
