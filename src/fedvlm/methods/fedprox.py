"""FedProx: FedAvg on a linear head with a proximal term towards the head that the client was sent.

Li et al., Federated optimization in heterogeneous networks, MLSys 2020.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, ClassTraits, Frozen, Tensors, register
from fedvlm.methods._settings import HeadSettings, head_traits
from fedvlm.methods.fedavg import FedAvg


@register
@dataclass(frozen=True)
class FedProx(HeadSettings):
    mu: float = 0.1  # μ of eq. 2

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        logits = FedAvg.predict(FedAvg(), frozen, shared, local, batch.x)
        fit = parts.masked_cross_entropy(logits, batch.y, batch.real)
        return fit + self.mu / 2 * (shared["head"] - start["head"]).square().sum()

    def extra_gradient(self, sent: Tensors, local: Tensors, head: Tensor) -> Tensor:
        return self.mu * (head - sent["head"])

    name = "fedprox"
    traits = head_traits(classes=ClassTraits(multi_label=True))
    init, predict, update_many = FedAvg.init, FedAvg.predict, parts.regularised_head_sgd
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
