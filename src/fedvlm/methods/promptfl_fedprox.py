"""PromptFL with FedProx: a proximal term towards the prompt that the client was sent.

PromptFL+FedProx of the FedOTP tables, whose code computes the term from detached tensors, so that it has no effect;
here it has a gradient.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Frozen, Tensors, Traits, register
from fedvlm.methods._prompts import sgd_stacked
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class PromptFLFedProx(PromptSettings):
    mu: float = 0.5  # μ

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        fit = PromptFL.loss(PromptFL(), frozen, shared, local, batch, start)
        return fit + self.mu / 2 * (shared["prompt"] - start["prompt"]).square().sum()

    name = "promptfl-fedprox"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    init, predict, update_many = PromptFL.init, PromptFL.predict, sgd_stacked
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
