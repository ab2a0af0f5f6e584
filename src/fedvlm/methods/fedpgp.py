"""FedPGP: a shared prompt plus a low-rank local one; a contrast keeps the shared prompt near the frozen class texts.

Cui, Li, Wang, Shi, Harmonizing generalization and personalization in federated prompt learning, ICML 2024.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedvlm import parts, seeds
from fedvlm.core import Batch, Frozen, Tensors, Traits, register
from fedvlm.core.schema import COUNT, NON_NEGATIVE, POSITIVE, ranged_field
from fedvlm.methods._prompts import features_of_pair, initial_prompt, prompt_logits, sgd_stacked
from fedvlm.methods._settings import PromptSettings


@register
@dataclass(frozen=True)
class FedPGP(PromptSettings):
    rank: int = ranged_field(4, COUNT)  # b, of the local prompt U V; the public code's default
    contrast_weight: float = ranged_field(1.0, NON_NEGATIVE)  # μ
    contrast_temperature: float = ranged_field(0.5, POSITIVE)  # τ
    local_epochs: int = 2  # E
    rounds: int = 25  # T

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        prompt, draw = initial_prompt(self, frozen), seeds.generator("local prompt", frozen.seed)
        shape = (len(prompt), self.rank), (self.rank, prompt.shape[1])
        left, right = (0.02 * torch.randn(*size, generator=draw) for size in shape)  # U, V
        if self.ctx_init == "template":
            right = torch.zeros_like(right)  # so that the first prompt is the template
        return {"prompt": prompt}, {"left": left, "right": right}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return prompt_logits(frozen, sent["prompt"] + local["left"] @ local["right"], x)

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        assert frozen.text is not None  # promised by `needs`
        prompt = shared["prompt"]
        features = features_of_pair(frozen, prompt, prompt + local["left"] @ local["right"])
        global_text, client_text = features.unbind(-3)  # (..., classes, dim)
        logits = frozen.scale * batch.x @ client_text.mT
        # -log of the softmax over two cosines of the shared prompt's features: with the frozen texts, and the client's
        gap = (global_text * client_text).sum(-1) - (global_text * frozen.text).sum(-1)
        contrast = softplus(gap / self.contrast_temperature).mean(-1).sum()
        return parts.masked_cross_entropy(logits, batch.y, batch.real) + self.contrast_weight * contrast

    name = "fedpgp"
    traits = Traits(needs=frozenset({"image", "text", "text tower"}))
    update_many = sgd_stacked
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
