"""The encoder's own zero-shot classifier, a baseline of every method.

Radford et al., Learning transferable visual models from natural language supervision, ICML 2021.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import ClassTraits, Frozen, Tensors, Traits, register
from fedvlm.methods._heads import zero_shot_logits
from fedvlm.methods._settings import CheckedSettings


@register
@dataclass(frozen=True)
class ZeroShot(CheckedSettings):
    rounds: int = 0

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {}, {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return zero_shot_logits(frozen, x)

    name = "zero-shot"
    traits = Traits(needs=frozenset({"image", "text"}), classes=ClassTraits(multi_label=True))
    send, update, aggregate, adapt = parts.send_all, parts.no_update, parts.mean, parts.no_adaptation
