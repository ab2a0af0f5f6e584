"""PromptFL with FedPer: the first vectors of a prompt are averaged, the others are local.

PromptFL+FedPer of the FedOTP tables: Arivazhagan et al., Federated learning with personalization layers, 2019, with
vectors in place of layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.core.schema import Range, check_range
from fedvlm.methods._prompts import DEFAULT_N_CTX, initial_prompt, prompt_logits, sgd_stacked
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class PromptFLFedPer(PromptSettings):
    local_vectors: int = 8  # the last vectors, which are never sent

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_ctx is not None or self.ctx_init == "random":  # the length of the template is not known yet
            self.check_local_vectors(self.n_ctx or DEFAULT_N_CTX)

    def check_local_vectors(self, n_ctx: int) -> None:
        check_range(f"promptfl-fedper.local_vectors (with n_ctx = {n_ctx})", self.local_vectors, Range(0, n_ctx - 1))

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        prompt = initial_prompt(self, frozen)
        self.check_local_vectors(len(prompt))
        cut = len(prompt) - self.local_vectors
        return {"prompt": prompt[:cut]}, {"local prompt": prompt[cut:]} if self.local_vectors else {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return prompt_logits(frozen, torch.cat([sent["prompt"], *local.values()], dim=-2), x)

    name = "promptfl-fedper"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    loss, update_many = PromptFL.loss, sgd_stacked
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
