"""FedOT with nothing local: the head and the skew of one orthogonal map are both averaged.

Called FedAVG in the FedOT paper, as the ablation of the local map. Skews are averaged, not maps, so that the average is
orthogonal again.
"""

from dataclasses import dataclass

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, register
from fedvlm.core.schema import COUNT, ranged_field
from fedvlm.methods._settings import FedOTSettings, head_traits
from fedvlm.methods.fedot import FedOT


@register
@dataclass(frozen=True)
class FedOTAllGlobal(FedOTSettings):
    blocks: int = ranged_field(1, COUNT)  # r, any divisor of d

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared, local = FedOT(blocks=self.blocks, head=self.head).init(frozen)
        return {**shared, **local}, {}

    name = "fedot-all-global"
    traits = head_traits()
    predict, loss, describe, update_many = FedOT.predict, FedOT.loss, FedOT.describe, FedOT.update_many
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
