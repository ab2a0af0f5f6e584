"""One prompt per client, trained on its own rows alone: what federation has to beat.

Zhou et al., Learning to prompt for vision-language models, IJCV 2022. An unseen client has the
first prompt, so only personalisation is defined.
"""

from dataclasses import dataclass

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.methods._prompts import Start, initial_prompt, sgd_stacked
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class CoOp:
    n_ctx: int | None = None  # M: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 1e-3  # η; FedOTP's tables, the CoOp paper has 2e-3
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 5  # E, per round, so that its budget is that of the federated methods
    rounds: int = 10  # T

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {}, {"prompt": initial_prompt(self, frozen)}

    name = "coop"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    predict, loss = PromptFL.predict, PromptFL.loss
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
    update_many = sgd_stacked
