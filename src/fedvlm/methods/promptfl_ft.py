"""PromptFL, after which every client trains the last global prompt on its own rows.

PromptFL+FT of the pFedPrompt and FedOTP tables; the code of PromptFolio calls something else so.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.methods._prompts import Start, initial_prompt, sgd_stacked
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class PromptFLFT:
    n_ctx: int | None = None  # M: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 1e-3  # η
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 5  # E, of a round and of the fine-tuning
    rounds: int = 10  # T

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        prompt = initial_prompt(self, frozen)
        return {"prompt": prompt}, {"offset": torch.zeros_like(prompt)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        tuned = {"prompt": sent["prompt"] + local["offset"]}
        return PromptFL.predict(PromptFL(), frozen, tuned, {}, x)

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        tuned, _ = parts.sgd(self, frozen, sent, local, client)
        return {"offset": tuned["prompt"] - sent["prompt"]}

    name = "promptfl-ft"
    traits = Traits(needs=frozenset({"image", "text tower"}), training=TrainingTraits(memory=frozenset({"offset"})))
    loss = PromptFL.loss
    send, update, aggregate = parts.send_all, parts.sgd, parts.mean
    update_many = sgd_stacked
