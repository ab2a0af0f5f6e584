"""PromptFL with fine-tuning: after the last round every client trains the shared prompt on its own samples.

PromptFL+FT of the pFedPrompt and FedOTP tables; in the code of PromptFolio the name stands for another method.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.methods._prompts import initial_prompt, prompt_logits, sgd_stacked
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class PromptFLFT(PromptSettings):
    local_epochs: int = 5  # E, of a round and of the fine-tuning

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        prompt = initial_prompt(self, frozen)
        return {"prompt": prompt}, {"offset": torch.zeros_like(prompt)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return prompt_logits(frozen, sent["prompt"] + local["offset"], x)

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        tuned, _ = parts.sgd(self, frozen, sent, local, client)
        return {"offset": tuned["prompt"] - sent["prompt"]}

    name = "promptfl-ft"
    traits = Traits(needs=frozenset({"image", "text tower"}), training=TrainingTraits(memory=frozenset({"offset"})))
    loss, update_many = PromptFL.loss, sgd_stacked
    send, update, aggregate = parts.send_all, parts.sgd, parts.mean
