"""FedAKT: a small shared adapter beside the frozen features, and one local head for both.

A client's head classifies the frozen and the adapted features, and a penalty keeps the two close. There is no public
code: this is FedAKT(C) of the FedOT paper as its authors describe it; averaging the logits of both views is our choice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm import parts, seeds
from fedvlm.core import Batch, Frozen, Tensors, register
from fedvlm.core.schema import COUNT, NON_NEGATIVE, ranged_field
from fedvlm.methods._heads import initial_head
from fedvlm.methods._settings import HeadSettings, head_traits


@register
@dataclass(frozen=True)
class FedAKT(HeadSettings):
    width: int = ranged_field(128, COUNT)  # of the adapter's bottleneck
    distil: float = ranged_field(1.0, NON_NEGATIVE)  # λ, weight of the distance between the two views

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        draw = seeds.generator("adapter", frozen.seed)
        shared = {
            "down": torch.randn(self.width, frozen.dim, generator=draw) * frozen.dim**-0.5,
            "up": torch.zeros(frozen.dim, self.width),  # the adapter starts as the identity
        }
        return shared, {"head": initial_head(self.head, frozen)}

    def adapter(self, shared: Tensors, x: Tensor) -> Tensor:
        return normalize(x + torch.relu(x @ shared["down"].mT) @ shared["up"].mT, dim=-1)

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        mean_features = (x + self.adapter(sent, x)) / 2
        return frozen.scale * mean_features @ local["head"].mT

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        x, y, real = batch.x, batch.y, batch.real
        adapted = self.adapter(shared, x)
        fits = [parts.masked_cross_entropy(frozen.scale * view @ local["head"].mT, y, real) for view in (x, adapted)]
        # The features are frozen, so only the adapter's half of the mutual distillation is left.
        distance = torch.where(real > 0, (adapted - x).square().sum(1), 0.0).sum() / (real > 0).sum().clamp(min=1)
        return fits[0] + fits[1] + self.distil * distance

    name = "fedakt"
    traits = head_traits()
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
