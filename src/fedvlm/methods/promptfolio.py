"""PromptFolio: a shared and a local prompt whose class features are mixed.

Pan et al., Federated learning from vision-language foundation models: theoretical analysis and method, NeurIPS 2024.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.core.schema import UNIT, ranged_field
from fedvlm.methods._prompts import features_of_pair, initial_prompt, sgd_stacked
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods.promptfl import PromptFL

VECTORS = 8  # M of the paper's code


@register
@dataclass(frozen=True)
class PromptFolio(PromptSettings):
    mix: float = ranged_field(0.4, UNIT)  # θ: weight of the local prompt's features
    n_ctx: int | None = None  # M: 8, or the template's
    lr: float = 2e-3  # η

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared = {"prompt": initial_prompt(self, frozen, default=VECTORS)}
        return shared, {"local prompt": initial_prompt(self, frozen, "local prompt", VECTORS)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        shared_features, local_features = features_of_pair(frozen, sent["prompt"], local["local prompt"]).unbind(-3)
        # each of unit norm before the mix and not normalised after it, as in the paper's code
        return frozen.scale * x @ ((1 - self.mix) * shared_features + self.mix * local_features).mT

    name = "promptfolio"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    loss, update_many = PromptFL.loss, sgd_stacked
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
