"""FedOTP: a shared and a local prompt, matched to image patches by optimal transport.

Li, Huang, Wang, Shi, Global and local prompts cooperation via optimal transport for federated learning, CVPR 2024. A
client that has not been sampled yet has the initial local prompt, as in the paper's algorithm; in the public code all
clients train in the first round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from fedvlm import parts
from fedvlm.core import ClassTraits, Frozen, Tensors, Traits, register
from fedvlm.core.schema import POSITIVE, POSITIVE_FRACTION, ranged_field
from fedvlm.maths.optimal_transport import TransportKind, transport_plan
from fedvlm.methods._prompts import features_of_pair, initial_prompt, sgd_stacked
from fedvlm.methods._settings import PromptSettings


@register
@dataclass(frozen=True)
class FedOTP(PromptSettings):
    transport: TransportKind = "unbalanced"  # of patches to prompts
    gamma: float = ranged_field(0.8, POSITIVE_FRACTION)  # γ: fraction of the patches that is matched, if unbalanced
    entropy_reg: float = ranged_field(0.1, POSITIVE)  # λ, weight of the entropy
    n_ctx: int | None = None  # s of each prompt: 16, or the template's
    momentum: float = 0.9  # of the public code; the paper does not say
    local_epochs: int = 5  # R; 1 for CIFAR
    rounds: int = 10  # T; 150 for CIFAR

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared = {"prompt": initial_prompt(self, frozen)}
        return shared, {"local prompt": initial_prompt(self, frozen, "local prompt")}

    def similarity(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        """Return (samples, classes, 2, patches) cosines with the features of the shared and the local prompt."""
        features = features_of_pair(frozen, sent["prompt"], local["local prompt"])
        text = features.transpose(-3, -2).flatten(-3, -2)  # (classes x 2 prompts, dim)
        patches = normalize(x, dim=-1)  # (samples, patches, dim)
        return torch.unflatten(text.unsqueeze(-3) @ patches.mT, -2, (-1, 2))

    def match(self, similarity: Tensor) -> Tensor:
        """Return the plan T of the same shape, without a gradient."""
        with torch.no_grad():
            return transport_plan(similarity.detach(), self.transport, self.gamma, self.entropy_reg)

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        similarity = self.similarity(frozen, sent, local, x)
        return frozen.scale * (self.match(similarity) * similarity).sum(dim=(-2, -1))

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        """Return the effective γ, and the cosine of the two prompts."""
        prompts = sent["prompt"].flatten(), local["local prompt"].flatten()
        mass = self.gamma if self.transport == "unbalanced" else 1.0
        return {"gamma": mass, "cosine of the prompts": float(cosine_similarity(*prompts, dim=0))}

    name = "fedotp"
    traits = Traits(needs=frozenset({"patches", "text tower"}), classes=ClassTraits(multi_label=True))
    loss, update_many = parts.cross_entropy, sgd_stacked
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
