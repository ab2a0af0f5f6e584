"""FedBEns in one round: each client's posterior over prompts, and the modes of their product.

FedBEns + PromptFL of the TOFA tables: Talpini et al., FedBEns: One-shot federated learning based on Bayesian ensemble,
ICML 2025. A client's posterior is a mixture of Gaussians around several trained prompts. The server finds one mode for
each of them; the predictions of the modes are averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from fedvlm import parts
from fedvlm.core import Batch, Client, Frozen, Tensors, Traits, register
from fedvlm.core.schema import COUNT, POSITIVE, ranged_field
from fedvlm.errors import SettingsError
from fedvlm.maths.fisher import find_mode
from fedvlm.methods._prompts import initial_prompt, prompt_logits
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods.fedlpa import FedLPA, fisher_samples

MAX_PRECISION = 1e6  # a variance is at least 1e-6


@register
@dataclass(frozen=True)
class FedBEns(PromptSettings):
    prompts_per_client: int = ranged_field(3, COUNT)  # M': prompts a client trains, with different initial values
    prior: float = ranged_field(10.0, POSITIVE)  # precision of the prior N(0, 1/prior) of every number
    temperature: float = 0.1  # T: the Fisher information is divided by it
    iterations: int = 50  # of the server's search for a mode
    lr: float = 1e-2  # η
    weight_decay: float = 0.0
    local_epochs: int = 50  # E
    rounds: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ctx_init == "template" and self.prompts_per_client > 1:
            raise SettingsError(
                f"ctx_init = 'template' and prompts_per_client = {self.prompts_per_client}: prompts with the same "
                "initial values stay the same; set prompts_per_client = 1, or ctx_init = 'random'"
            )

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        purposes = ("prompt", *(f"prompt {i}" for i in range(1, self.prompts_per_client)))
        starts = [initial_prompt(self, frozen, purpose) for purpose in purposes]
        return {"prompts": torch.stack(starts)}, {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        # log of the mean probability over the prompts, up to a constant
        return prompt_logits(frozen, sent["prompts"], x).log_softmax(dim=-1).logsumexp(dim=-3)

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        """Return the sum over the prompts, which are therefore trained independently."""
        logits = prompt_logits(frozen, shared["prompts"], batch.x).unbind(dim=-3)
        return torch.stack([parts.masked_cross_entropy(part, batch.y, batch.real) for part in logits]).sum()

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        upload, new_local = parts.sgd(self, frozen, sent, local, client)

        def fisher_diagonal(prompt: Tensor) -> Tensor:
            return torch.stack(fisher_samples(frozen, prompt, client)).square().sum(dim=0) / self.local_epochs

        fisher = vmap(fisher_diagonal)(upload["prompts"])
        precision = (fisher / self.temperature + self.prior).clamp(max=max(MAX_PRECISION, self.prior))
        return {"means": upload["prompts"], "precisions": precision}, new_local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        stacks = {key: torch.stack([upload[key].double().flatten(1) for upload in uploads]) for key in uploads[0]}
        means, precisions = stacks["means"], stacks["precisions"]
        starts = means.median(dim=0).values  # (prompts, numbers)
        modes = [find_mode(means, precisions, self.prior, start, self.iterations) for start in starts]
        like = shared["prompts"]
        return {"prompts": torch.stack(modes).reshape(like.shape).to(like.dtype)}

    name = "fedbens"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    noise = FedLPA.noise
    send, adapt = parts.send_all, parts.no_adaptation
