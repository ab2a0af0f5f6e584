"""FedAvg on the image tower with a pull of each client's weights towards those it was sent.

Li et al., Federated optimization in heterogeneous networks, MLSys 2020: the distance is squared
and comes from the weights that are trained. FAA-CLIP's code takes the distance itself.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Frozen, Tensors, Traits, register
from fedvlm.methods._towers import text_logits, tower_of
from fedvlm.methods.fedavg_tower import FedAvgTower


@register
@dataclass(frozen=True)
class FedProxTower:
    mu: float = 1e-2  # μ of eq. 2; FAA-CLIP has μ/2 = 5e-3
    blocks: int = 0  # of the tower that are trained, the last ones; 0 is all of it
    lr: float = 5e-5  # η
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.02
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 50  # T

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        logits = text_logits(frozen, tower_of(frozen)(shared, batch.x))
        fit = parts.masked_cross_entropy(logits, batch.y, batch.real)
        if self.mu == 0:
            return fit
        distance = sum(((shared[key] - start[key]).square().sum() for key in shared), start=0.0 * fit)
        return fit + self.mu / 2 * distance

    name = "fedprox-tower"
    traits = Traits(needs=frozenset({"image tower", "text"}))
    init, predict, describe = FedAvgTower.init, FedAvgTower.predict, FedAvgTower.describe
    send, update, aggregate, adapt = parts.send_all, parts.adam, parts.mean, parts.no_adaptation
