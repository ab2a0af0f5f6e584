"""FedOT over a prompt: the shared head is the class features of an averaged prompt.

Every client still rotates its features by its own orthogonal map; unseen clients use the identity, so that before the
first round this is PromptFL. Appendix E.3 of the FedOT paper (see fedot).
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.core.schema import COUNT, ranged_field
from fedvlm.maths import orthogonal
from fedvlm.methods._prompts import class_features, initial_prompt, sgd_stacked
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods.fedot import FedOT, identity_skew
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class FedOTPrompt(PromptSettings):
    n_ctx: int | None = None  # M: 16, or the template's; the paper says K
    blocks: int = ranged_field(1, COUNT)  # r, any divisor of d
    lr: float = 1e-3  # η of both the prompt and the map
    local_epochs: int = 1  # E
    rounds: int = 50  # T

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        prompt = initial_prompt(self, frozen)
        return {"prompt": prompt}, {"skew": identity_skew(frozen.dim, self.blocks)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        head = class_features(frozen, sent["prompt"])
        return frozen.scale * x @ orthogonal.rotate(-local["skew"], head).mT

    name = "fedot-prompt"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    loss, describe, update_many = PromptFL.loss, FedOT.describe, sgd_stacked
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
