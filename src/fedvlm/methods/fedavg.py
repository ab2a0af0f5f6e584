"""FedAvg: one linear head, trained by every client and averaged each round, weighted by number of samples.

McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import ClassTraits, Frozen, Tensors, register
from fedvlm.methods._heads import initial_head
from fedvlm.methods._settings import HeadSettings, head_traits


@register
@dataclass(frozen=True)
class FedAvg(HeadSettings):
    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {"head": initial_head(self.head, frozen)}, {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return frozen.scale * x @ sent["head"].mT

    name = "fedavg"
    traits = head_traits(classes=ClassTraits(multi_label=True))
    loss, update_many = parts.cross_entropy, parts.head_sgd
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
