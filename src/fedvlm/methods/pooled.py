"""Not federated: the logistic regression of `alone` on the rows of all training clients at once.

What federation would reach if rows could travel. It runs in a simulation only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, PrivacyTraits, Tensors, Traits, register
from fedvlm.maths import gaussian_classes, logistic_regression
from fedvlm.methods.alone import fit_local_path


@register
@dataclass(frozen=True)
class Pooled:
    rounds: int = 1

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes = len(frozen.classes)
        head = {"weight": torch.zeros(classes, frozen.dim), "bias": torch.zeros(classes)}
        return {**head, "slope": torch.zeros(())}, {}

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        ridges, path, has_samples = fit_local_path(frozen, client)
        best = logistic_regression.select_ridge(path, ridges, client.val_x, client.val_y)[None]
        weight, bias = (part.index_select(0, best)[0] for part in path.heads)
        never = torch.where(has_samples, bias, gaussian_classes.ABSENT_CLASS_LOGIT)
        max_gradient = path.max_gradient.index_select(0, best)[0]
        head = {"weight": weight, "bias": never, "slope": max_gradient}
        return {key: value.float() for key, value in head.items()}, local

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return x @ sent["weight"].mT + sent["bias"]

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        return {"slope left": float(sent["slope"])}

    name = "pooled"
    traits = Traits(needs=frozenset({"image"}), privacy=PrivacyTraits(centralised=True))
    send, aggregate, adapt = parts.send_all, parts.mean, parts.no_adaptation
