"""FedAvg that fine-tunes the encoder's image tower, all of it or its last blocks; the text is frozen.

The fine-tuned baseline of FedCLIP and FAA-CLIP (McMahan et al., AISTATS 2017, on CLIP). At this learning rate it is
known to destroy a large CLIP.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.core.schema import NON_NEGATIVE, ranged_field
from fedvlm.methods._settings import AdamSettings, LossSettings
from fedvlm.methods._towers import count_parameters, text_logits, tower_of


@register
@dataclass(frozen=True)
class FedAvgTower(LossSettings, AdamSettings):
    blocks: int = ranged_field(0, NON_NEGATIVE)  # last blocks of the tower that are trained; 0 trains all of it

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        tower = tower_of(frozen)
        return {key: tower.weights[key] for key in tower.last(self.blocks)}, {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return text_logits(frozen, tower_of(frozen)(sent, x))

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        return count_parameters(frozen, sum(value.numel() for value in sent.values()))

    name = "fedavg-tower"
    traits = Traits(needs=frozenset({"image tower", "text"}))
    loss = parts.cross_entropy
    send, update, aggregate, adapt = parts.send_all, parts.adam, parts.mean, parts.no_adaptation
