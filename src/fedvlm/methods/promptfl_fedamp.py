"""PromptFL with FedAMP: a prompt per client, drawn towards those of clients with similar prompts.

PromptFL+FedAMP of the FedOTP tables: Huang et al., Personalized cross-silo federated learning on non-IID data, AAAI
2021. The server keeps every client's prompt and sends each client a mean of similar ones, its cloud; in the public code
the attraction has the wrong sign and no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.core.schema import NON_NEGATIVE, POSITIVE, ranged_field
from fedvlm.methods._prompts import sgd_stacked
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods.promptfl_ft import PromptFLFT

PROMPT_PREFIX = "of "  # with a client's id: the prompt of the client


@register
@dataclass(frozen=True)
class PromptFLFedAMP(PromptSettings):
    # α_K: how much of another client's equal prompt goes into a cloud
    alpha: float = ranged_field(0.1, POSITIVE)
    # σ: squared distance at which the attraction has fallen to 1/e
    sigma: float = ranged_field(1.0, POSITIVE)
    prox_weight: float = ranged_field(0.05, NON_NEGATIVE)  # λ: of a client's prompt towards its cloud

    def cloud_weights(self, prompt: Tensor, other_prompts: Sequence[Tensor]) -> Tensor:
        """Return (others,) ξ, the weights of the other prompts in a cloud; their sum is at most 1."""
        distances = torch.stack([(prompt - other_prompt).double().square().sum() for other_prompt in other_prompts])
        weight = self.alpha * torch.exp(-distances / self.sigma) / self.sigma
        return weight / weight.sum().clamp(min=1)

    def send(self, shared: Tensors, id: str) -> Tensors:
        """Return the cloud of a client that has taken part, and the mean of all prompts for any other."""
        client_prompt = shared.get(PROMPT_PREFIX + id)
        other_keys = [key for key in sorted(shared) if key.startswith(PROMPT_PREFIX) and key != PROMPT_PREFIX + id]
        other_prompts = [shared[key] for key in other_keys]
        if client_prompt is None or not other_prompts:
            return {"prompt": shared["prompt"] if client_prompt is None else client_prompt}
        weights = self.cloud_weights(client_prompt, other_prompts)
        shift = (weights[:, None, None] * torch.stack([o.double() - client_prompt for o in other_prompts])).sum(0)
        return {"prompt": (client_prompt + shift).to(client_prompt.dtype)}

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        logits = PromptFLFT.predict(PromptFLFT(), frozen, shared, local, batch.x)
        distance = (shared["prompt"] - start["prompt"]).square().sum()
        return parts.masked_cross_entropy(logits, batch.y, batch.real) + self.prox_weight / (2 * self.alpha) * distance

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        new = {PROMPT_PREFIX + id: upload["prompt"] for id, upload in zip(ids, uploads, strict=True)}
        held = {key: value for key, value in {**shared, **new}.items() if key.startswith(PROMPT_PREFIX)}
        prompts = [{"prompt": held[key]} for key in sorted(held)]
        first = {"prompt": shared["prompt"]}
        return {**parts.uniform_mean(self, first, prompts, torch.ones(len(prompts)), sorted(held)), **held}

    name = "promptfl-fedamp"
    traits = Traits(needs=frozenset({"image", "text tower"}), training=TrainingTraits(memory=frozenset({"offset"})))
    # A client's own model is fine-tuned from its last cloud.
    init, predict, adapt, update_many = PromptFLFT.init, PromptFLFT.predict, PromptFLFT.adapt, sgd_stacked
    update = parts.sgd
