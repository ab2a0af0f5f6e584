"""FedAvg that trains the encoder's image tower, whole or its last blocks; the text stays as it is.

The fine-tuned baseline of FedCLIP and FAA-CLIP (McMahan et al., AISTATS 2017, on CLIP). At this
rate it is known to destroy a large CLIP: its place is in a table, beside what does better.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.methods._towers import count_parameters, text_logits, tower_of


@register
@dataclass(frozen=True)
class FedAvgTower:
    blocks: int = 0  # of the tower that are trained, the last ones; 0 is all of it
    lr: float = 5e-5  # η, FAA-CLIP's, as is the rest of its Adam
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.02  # added to the gradient, not AdamW's
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 50  # T

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
