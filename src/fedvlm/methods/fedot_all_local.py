"""FedOT without federation: every client trains its own head and orthogonal map alone.

The local baseline of the FedOT paper's ablation. An unseen client has the initial head, so only personalisation is
defined.
"""

from dataclasses import dataclass

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, register
from fedvlm.core.schema import COUNT, ranged_field
from fedvlm.methods._settings import FedOTSettings, head_traits
from fedvlm.methods.fedot import FedOT


@register
@dataclass(frozen=True)
class FedOTAllLocal(FedOTSettings):
    blocks: int = ranged_field(1, COUNT)  # r, any divisor of d

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared, local = FedOT(blocks=self.blocks, head=self.head).init(frozen)
        return {}, {**shared, **local}

    name = "fedot-all-local"
    traits = head_traits()
    predict, loss, describe, update_many = FedOT.predict, FedOT.loss, FedOT.describe, FedOT.update_many
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
