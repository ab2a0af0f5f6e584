"""PromptFL: one prompt before every class name, trained by every client and averaged each round.

Guo et al., PromptFL: Let federated participants cooperatively learn prompts instead of models, IEEE Transactions on
Mobile Computing 2023; the prompt is CoOp's.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import ClassTraits, Frozen, Tensors, Traits, register
from fedvlm.methods._prompts import initial_prompt, prompt_logits, sgd_stacked
from fedvlm.methods._settings import PromptSettings


@register
@dataclass(frozen=True)
class PromptFL(PromptSettings):
    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {"prompt": initial_prompt(self, frozen)}, {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return prompt_logits(frozen, {**sent, **local}["prompt"], x)  # CoOp's is local

    name = "promptfl"
    traits = Traits(needs=frozenset({"image", "text tower"}), classes=ClassTraits(multi_label=True))
    loss, update_many = parts.cross_entropy, sgd_stacked
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
