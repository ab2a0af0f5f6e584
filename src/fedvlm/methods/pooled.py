"""Not federated: the logistic regression of `alone` on the rows of all training clients at once.

What federation would reach if rows could travel. It runs in a simulation only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, Tensors, Traits, register
from fedvlm.maths import gaussian, probe
from fedvlm.methods.alone import own_path


@register
@dataclass(frozen=True)
class Pooled:
    rounds: int = 1

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes = len(frozen.classes)
        return {"weight": torch.zeros(classes, frozen.dim), "bias": torch.zeros(classes)}, {}

    def update(
        self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client
    ) -> tuple[Tensors, Tensors]:
        ridges, path, there = own_path(frozen, client)
        best = probe.chosen(path, ridges, client.held_x, client.held_y)[None]
        weight, bias = (part.index_select(0, best)[0] for part in path.heads)
        never = torch.where(there, bias, gaussian.NEVER)
        return {"weight": weight.float(), "bias": never.float()}, local

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return x @ sent["weight"].mT + sent["bias"]

    name = "pooled"
    traits = Traits(needs=frozenset({"image"}), centralised=True)
    send, aggregate, adapt = parts.everything, parts.mean, parts.nothing
