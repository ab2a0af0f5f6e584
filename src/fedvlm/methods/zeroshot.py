"""The encoder's own classifier, untouched: the bar every other method has to clear.

Radford et al., Learning transferable visual models from natural language supervision, ICML 2021.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, Traits, register


@register
@dataclass(frozen=True)
class ZeroShot:
    rounds: int = 0

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {}, {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        assert frozen.text is not None  # promised by `needs`
        return frozen.scale * x @ frozen.text.mT

    name = "zero-shot"
    traits = Traits(needs=frozenset({"image", "text"}))
    send, update, aggregate, adapt = parts.send_all, parts.no_update, parts.mean, parts.no_adaptation
