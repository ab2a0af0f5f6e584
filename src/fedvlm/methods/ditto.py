"""FedAvg on a linear head, and beside it each client's own head that is pulled towards the shared one.

Li, Hu, Beirami, Smith, Ditto: fair and robust federated learning through personalization, ICML 2021. The two
objectives share no tensor, so one gradient of their sum trains both on the same minibatches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Frozen, Tensors, TrainingTraits, register
from fedvlm.core.schema import NON_NEGATIVE, ranged_field
from fedvlm.methods._heads import initial_head
from fedvlm.methods._settings import HeadSettings, head_traits


@register
@dataclass(frozen=True)
class Ditto(HeadSettings):
    prox_weight: float = ranged_field(0.1, NON_NEGATIVE)  # λ of the personal objective

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        head = initial_head(self.head, frozen)
        # a client that never trained has no head of its own: it uses the shared one
        return {"head": head}, {"personal head": head, "is trained": torch.zeros(())}

    def loss(
        self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors
    ) -> tuple[Tensor, Tensors]:
        total = self.prox_weight / 2 * (local["personal head"] - start["head"]).square().sum()
        for head in (shared["head"], local["personal head"]):
            total = total + parts.masked_cross_entropy(frozen.scale * batch.x @ head.mT, batch.y, batch.real)
        return total, {"is trained": torch.ones(())}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        head = torch.where(local["is trained"] > 0, local["personal head"], sent["head"])
        return frozen.scale * x @ head.mT

    name = "ditto"
    traits = head_traits(training=TrainingTraits(memory=frozenset({"is trained"})))
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
