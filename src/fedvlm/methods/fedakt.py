"""A small shared adapter beside the frozen features, and one local head for both.

The head of a client classifies the features as they are and as the adapter turns them, and the
adapter is held near the features. There is no public code: this is FedAKT(C) of the FedOT paper as
its authors describe the idea, and the averaged logits of both views are our choice.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm import parts, seeds
from fedvlm.core import Batch, Frozen, Tensors, register
from fedvlm.methods._heads import head_traits, initial_head


@register
@dataclass(frozen=True)
class FedAKT:
    width: int = 128  # of the adapter's bottleneck
    distil: float = 1.0  # λ, how much the two views are held together
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 5e-4
    batch_size: int = 32
    local_epochs: int = 1
    rounds: int = 50
    head: Literal["text", "random"] = "text"

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        draw = seeds.generator("adapter", frozen.seed)
        shared = {
            "down": torch.randn(self.width, frozen.dim, generator=draw) * frozen.dim**-0.5,
            "up": torch.zeros(frozen.dim, self.width),  # at first the adapter is the identity
        }
        return shared, {"head": initial_head(self.head, frozen)}

    def adapter(self, shared: Tensors, x: Tensor) -> Tensor:
        return normalize(x + torch.relu(x @ shared["down"].mT) @ shared["up"].mT, dim=-1)

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        mean_features = (x + self.adapter(sent, x)) / 2
        return frozen.scale * mean_features @ local["head"].mT

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        x, y, real = batch.x, batch.y, batch.real
        turned = self.adapter(shared, x)
        fits = [parts.masked_cross_entropy(frozen.scale * view @ local["head"].mT, y, real) for view in (x, turned)]
        # The features are frozen, so of the mutual distillation the adapter's half is left.
        distance = torch.where(real, (turned - x).square().sum(1), 0.0).sum() / real.sum().clamp(min=1)
        return fits[0] + fits[1] + self.distil * distance

    name = "fedakt"
    traits = head_traits()
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
