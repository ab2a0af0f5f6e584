"""Not federated: the logistic regression of `alone` on the samples of all training clients together.

It is the reference for federated methods, and runs in a simulation only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import ClassTraits, Client, Frozen, PrivacyTraits, Tensors, Traits, register
from fedvlm.maths.gaussian_classes import ABSENT_CLASS_LOGIT
from fedvlm.maths.logistic_regression import select_ridge
from fedvlm.methods._heads import fit_local_path
from fedvlm.methods._settings import CheckedSettings


@register
@dataclass(frozen=True)
class Pooled(CheckedSettings):
    rounds: int = 1

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes = len(frozen.classes)
        head = {"weight": torch.zeros(classes, frozen.dim), "bias": torch.zeros(classes)}
        return {**head, "gradient": torch.zeros(())}, {}

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        ridges, path, has_samples = fit_local_path(frozen, client)
        best = select_ridge(path, ridges, client.val_x, client.val_y)[None]
        weight, bias = (part.index_select(0, best)[0] for part in path.heads)
        bias = torch.where(has_samples, bias, ABSENT_CLASS_LOGIT)
        max_gradient = path.max_gradient.index_select(0, best)[0]
        head = {"weight": weight, "bias": bias, "gradient": max_gradient}
        return {key: value.float() for key, value in head.items()}, local

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return x @ sent["weight"].mT + sent["bias"]

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        return {"remaining gradient": float(sent["gradient"])}

    name = "pooled"
    traits = Traits(
        needs=frozenset({"image"}), privacy=PrivacyTraits(centralised=True), classes=ClassTraits(multi_label=True)
    )
    send, aggregate, adapt = parts.send_all, parts.mean, parts.no_adaptation
