"""CoOp: one prompt per client, trained on its own samples alone; a baseline of federated prompts.

Zhou et al., Learning to prompt for vision-language models, IJCV 2022. An unseen client has the initial prompt, so only
personalisation is defined.
"""

from dataclasses import dataclass

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.methods._prompts import initial_prompt, sgd_stacked
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class CoOp(PromptSettings):
    lr: float = 1e-3  # η of FedOTP's tables; the CoOp paper has 2e-3
    local_epochs: int = 5  # E per round, the budget of the federated methods

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {}, {"prompt": initial_prompt(self, frozen)}

    name = "coop"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    predict, loss, update_many = PromptFL.predict, PromptFL.loss, sgd_stacked
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
