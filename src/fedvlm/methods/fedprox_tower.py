"""FedProx on the image tower: FedAvg with a proximal term towards the weights that the client was sent.

Li et al., Federated optimization in heterogeneous networks, MLSys 2020: the squared distance of the trained weights.
FAA-CLIP's code takes the distance itself.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Frozen, Tensors, Traits, register
from fedvlm.core.schema import NON_NEGATIVE, ranged_field
from fedvlm.methods._settings import AdamSettings, LossSettings
from fedvlm.methods._towers import text_logits, tower_of
from fedvlm.methods.fedavg_tower import FedAvgTower


@register
@dataclass(frozen=True)
class FedProxTower(LossSettings, AdamSettings):
    mu: float = 1e-2  # μ of eq. 2; FAA-CLIP has μ/2 = 5e-3
    blocks: int = ranged_field(0, NON_NEGATIVE)  # last blocks of the tower that are trained; 0 trains all of it

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
