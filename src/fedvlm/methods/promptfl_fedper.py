"""PromptFL with a prompt of two parts: the first vectors are averaged, the rest stay at home.

PromptFL+FedPer of the FedOTP tables: Arivazhagan et al., Federated learning with personalization
layers, 2019, with vectors in the place of layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.errors import SettingsError
from fedvlm.methods._prompts import DEFAULT_N_CTX, Start, initial_prompt, sgd_stacked
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class PromptFLFedPer:
    n_ctx: int | None = None  # M: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    local_vectors: int = 8  # of the vectors, the last ones: never sent
    lr: float = 1e-3  # η
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 5  # E
    rounds: int = 10  # T

    def __post_init__(self) -> None:
        usual = DEFAULT_N_CTX if self.ctx_init == "random" else self.local_vectors + 1  # the template is not known yet
        self.check(usual if self.n_ctx is None else self.n_ctx)

    def check(self, vectors: int) -> None:
        if not 0 <= self.local_vectors < vectors:
            raise SettingsError(
                f"local_vectors = {self.local_vectors} of n_ctx = {vectors}; keep 0 or more and share at least 1"
            )

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        prompt = initial_prompt(self, frozen)
        self.check(len(prompt))
        cut = len(prompt) - self.local_vectors
        return {"prompt": prompt[:cut]}, {"own": prompt[cut:]} if self.local_vectors else {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        prompt = torch.cat([sent["prompt"], *local.values()], dim=-2)
        return PromptFL.predict(PromptFL(), frozen, {"prompt": prompt}, {}, x)

    name = "promptfl-fedper"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    loss = PromptFL.loss
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
    update_many = sgd_stacked
