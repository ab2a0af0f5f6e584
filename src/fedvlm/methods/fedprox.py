"""FedAvg on a linear head with a pull of each client's head towards the one it was sent.

Li et al., Federated optimization in heterogeneous networks, MLSys 2020.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Frozen, Tensors, register
from fedvlm.methods._heads import head_traits
from fedvlm.methods.fedavg import FedAvg


@register
@dataclass(frozen=True)
class FedProx:
    mu: float = 0.1  # μ of eq. 2
    lr: float = 1e-3  # η
    momentum: float = 0.0
    weight_decay: float = 5e-4  # weight decay
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 50  # T
    head: Literal["text", "random"] = "text"

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        logits = FedAvg.predict(FedAvg(), frozen, shared, local, batch.x)
        fit = parts.masked_cross_entropy(logits, batch.y, batch.real)
        return fit + self.mu / 2 * (shared["head"] - start["head"]).square().sum()

    def extra_gradient(self, sent: Tensors, local: Tensors, head: Tensor) -> Tensor:
        return self.mu * (head - sent["head"])

    name = "fedprox"
    traits = head_traits()
    update_many = parts.regularised_head_sgd
    init, predict = FedAvg.init, FedAvg.predict
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
