"""FedOT with nothing kept at home: the head and the skew of one orthogonal map are both averaged.

Called FedAVG in the FedOT paper, where it shows what the local map is worth. Skews are averaged,
not maps, so that the average is a map again.
"""

from dataclasses import dataclass
from typing import Literal

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, register
from fedvlm.methods._heads import head_traits
from fedvlm.methods.fedot import FedOT


@register
@dataclass(frozen=True)
class FedOTAllGlobal:
    blocks: int = 1  # r, any divisor of d
    tau: float = 100.0  # τ
    lr: float = 5e-5  # η
    momentum: float = 5e-4
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 200  # T
    head: Literal["text", "random"] = "text"

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared, local = FedOT(blocks=self.blocks, head=self.head).init(frozen)
        return {**shared, **local}, {}

    name = "fedot-all-global"
    traits = head_traits()
    predict, loss, describe = FedOT.predict, FedOT.loss, FedOT.describe
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
    update_many = FedOT.update_many
