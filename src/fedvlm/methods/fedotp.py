"""A shared and a local prompt for every class, matched to image patches by a transport plan.

Li, Huang, Wang, Shi, Global and local prompts cooperation via optimal transport for federated
learning (FedOTP), CVPR 2024. A client that takes part late, or never did, has the first local
prompt, as in the paper's algorithm; the public code has every client train in the first round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from fedvlm import parts
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.maths.optimal_transport import TransportKind, check_plan, transport_plan
from fedvlm.methods._prompts import Start, features_of_pair, initial_prompt, sgd_stacked


@register
@dataclass(frozen=True)
class FedOTP:
    transport: TransportKind = "unbalanced"  # of patches to prompts
    gamma: float = 0.8  # γ: the share of an image's patches that prompts take, if unbalanced
    entropy_reg: float = 0.1  # λ of the entropy
    n_ctx: int | None = None  # s of each prompt: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 1e-3  # η
    momentum: float = 0.9  # the code's; the paper does not say
    weight_decay: float = 5e-4  # likewise
    batch_size: int = 32  # B
    local_epochs: int = 5  # R; 1 for CIFAR
    rounds: int = 10  # T; 150 for CIFAR

    def __post_init__(self) -> None:
        check_plan(self.gamma, self.entropy_reg)

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared = {"prompt": initial_prompt(self, frozen)}
        return shared, {"own": initial_prompt(self, frozen, "local prompt")}

    def similarity(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        """(rows, classes, 2, patches) cosines with the shared and the local prompt's features."""
        features = features_of_pair(frozen, sent["prompt"], local["own"])
        text = features.transpose(-3, -2).flatten(-3, -2)  # (classes and, for each, 2 prompts, dim)
        patches = normalize(x, dim=-1)  # (rows, patches, dim)
        return torch.unflatten(text.unsqueeze(-3) @ patches.mT, -2, (-1, 2))

    def match(self, similarity: Tensor) -> Tensor:
        """T of the same shape; it stays fixed while the prompts move."""
        with torch.no_grad():
            return transport_plan(similarity.detach(), self.transport, self.gamma, self.entropy_reg)

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        similarity = self.similarity(frozen, sent, local, x)
        return frozen.scale * (self.match(similarity) * similarity).sum(dim=(-2, -1))

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        """γ as it acts, and how far the two prompts have parted."""
        prompts = sent["prompt"].flatten(), local["own"].flatten()
        mass = self.gamma if self.transport == "unbalanced" else 1.0
        return {"gamma": mass, "cosine of the prompts": float(cosine_similarity(*prompts, dim=0))}

    name = "fedotp"
    traits = Traits(needs=frozenset({"patches", "text tower"}))
    loss = parts.cross_entropy
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
    update_many = sgd_stacked
