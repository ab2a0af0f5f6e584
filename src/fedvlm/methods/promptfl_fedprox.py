"""PromptFL with a pull of each client's prompt towards the one it was sent.

PromptFL+FedProx of the FedOTP tables, whose code computes the pull from detached tensors, so that
it does nothing; here it has a gradient.
"""

from dataclasses import dataclass

from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Frozen, Tensors, Traits, register
from fedvlm.methods._prompts import Start, sgd_stacked
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class PromptFLFedProx:
    mu: float = 0.5  # μ
    n_ctx: int | None = None  # M: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 1e-3  # η
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 5  # E
    rounds: int = 10  # T

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        fit = PromptFL.loss(PromptFL(), frozen, shared, local, batch, start)
        return fit + self.mu / 2 * (shared["prompt"] - start["prompt"]).square().sum()

    name = "promptfl-fedprox"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    init, predict = PromptFL.init, PromptFL.predict
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
    update_many = sgd_stacked
