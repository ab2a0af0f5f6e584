"""One prompt in front of every class name, trained by every client and averaged each round.

Guo et al., PromptFL: Let federated participants cooperatively learn prompts instead of models,
IEEE Transactions on Mobile Computing 2023; the prompt is CoOp's.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.methods._prompts import Start, class_features, initial_prompt, sgd_stacked


@register
@dataclass(frozen=True)
class PromptFL:
    n_ctx: int | None = None  # M: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 1e-3  # η
    momentum: float = 0.9
    weight_decay: float = 5e-4  # weight decay
    batch_size: int = 32  # B
    local_epochs: int = 5  # E
    rounds: int = 10  # T

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {"prompt": initial_prompt(self, frozen)}, {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        prompt = {**sent, **local}["prompt"]  # CoOp holds it locally
        return frozen.scale * x @ class_features(frozen, prompt).mT

    name = "promptfl"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    loss = parts.cross_entropy
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
    update_many = sgd_stacked
