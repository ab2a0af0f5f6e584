"""PromptFL with a prompt per client, drawn towards those of clients whose prompts are like it.

PromptFL+FedAMP of the FedOTP tables: Huang et al., Personalized cross-silo federated learning on
non-IID data, AAAI 2021. The server holds every client's prompt and sends each client its own cloud;
in the public code the attraction has the wrong sign and no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.core.schema import NON_NEGATIVE, POSITIVE, check_ranges, ranged_field
from fedvlm.methods._prompts import Start, sgd_stacked
from fedvlm.methods.promptfl_ft import PromptFLFT

PROMPT_PREFIX = "of "  # the server's name for a client's prompt: this and the client's id


@register
@dataclass(frozen=True)
class PromptFLFedAMP:
    # α_K: how much of another client's equal prompt goes into a cloud
    alpha: float = ranged_field(0.1, POSITIVE)
    # σ: squared distance at which the attraction has fallen to 1/e
    sigma: float = ranged_field(1.0, POSITIVE)
    prox_weight: float = ranged_field(0.05, NON_NEGATIVE)  # λ: of a client's prompt towards its cloud
    n_ctx: int | None = None  # M: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 1e-3  # η
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 5  # E
    rounds: int = 10  # T

    def __post_init__(self) -> None:
        check_ranges("promptfl-fedamp", self)

    def cloud_weights(self, prompt: Tensor, other_prompts: Sequence[Tensor]) -> Tensor:
        """(others,) ξ: what each other prompt weighs in a cloud; together at most 1."""
        distances = torch.stack([(prompt - other_prompt).double().square().sum() for other_prompt in other_prompts])
        weight = self.alpha * torch.exp(-distances / self.sigma) / self.sigma
        return weight / weight.sum().clamp(min=1)

    def send(self, shared: Tensors, id: str) -> Tensors:
        """The cloud of a client that has taken part; the mean of all for any other."""
        client_prompt = shared.get(PROMPT_PREFIX + id)
        other_prompts = [
            shared[key] for key in sorted(shared) if key.startswith(PROMPT_PREFIX) and key != PROMPT_PREFIX + id
        ]
        if client_prompt is None or not other_prompts:
            return {"prompt": shared["prompt"] if client_prompt is None else client_prompt}
        weights = self.cloud_weights(client_prompt, other_prompts)
        moved = (weights[:, None, None] * torch.stack([o.double() - client_prompt for o in other_prompts])).sum(0)
        return {"prompt": (client_prompt + moved).to(client_prompt.dtype)}

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
    # A client's own model is what it makes of its last cloud, as after fine-tuning.
    init, predict, adapt = PromptFLFT.init, PromptFLFT.predict, PromptFLFT.adapt
    update = parts.sgd
    update_many = sgd_stacked
