"""FedRep: a shared linear map below a local head; a round trains the head first and then the map.

Collins et al., Exploiting shared representations for personalized federated learning, ICML 2021, with a linear map that
starts as the identity in place of the network, which is frozen here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, register
from fedvlm.core.schema import EPOCHS, NON_NEGATIVE, check_range, ranged_field
from fedvlm.methods._heads import initial_head
from fedvlm.methods._settings import HeadInit, LossSettings, head_traits


@register
@dataclass(frozen=True)
class FedRep(LossSettings):
    head_epochs: int = ranged_field(10, NON_NEGATIVE)  # τ: first the head, with the map that was sent
    map_epochs: int = ranged_field(1, NON_NEGATIVE)  # then the map, with that head
    lr: float = 1e-3  # α
    momentum: float = 0.0
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    rounds: int = 50  # T
    head: HeadInit = "text"  # initial head: text embeddings, or random

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("fedrep: head_epochs + map_epochs", self.local_epochs, EPOCHS)

    @property
    def local_epochs(self) -> int:
        return self.head_epochs + self.map_epochs

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {"map": torch.eye(frozen.dim)}, {"head": initial_head(self.head, frozen)}

    def trains_in_epoch(self, key: str, epoch: Tensor) -> Tensor:
        return epoch < self.head_epochs if key == "head" else epoch >= self.head_epochs

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return frozen.scale * x @ (local["head"] @ sent["map"]).mT  # fewer products than x through the map

    name = "fedrep"
    traits = head_traits()
    loss, update_many = parts.cross_entropy, parts.map_sgd
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
