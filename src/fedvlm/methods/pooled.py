"""Not federated: a logistic regression on the samples of all training clients together, from text if there is text.

Without text it is the regression of `alone`. It is the reference for federated methods, and runs in a simulation only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import ClassTraits, Client, Frozen, PrivacyTraits, Tensors, Traits, register
from fedvlm.maths.logistic_regression import fit_best_head, split_head
from fedvlm.methods._heads import fit_head_alone
from fedvlm.methods._logistic import zero_shot_head
from fedvlm.methods._settings import LossSettings


@register
@dataclass(frozen=True)
class Pooled(LossSettings):
    rounds: int = 1

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes = len(frozen.classes)
        head = {"weight": torch.zeros(classes, frozen.dim), "bias": torch.zeros(classes)}
        return {**head, "gradient": torch.zeros(())}, {}

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        weights = parts.class_weights(self, len(frozen.classes), client)
        if frozen.text is None:
            head, _, gradient = fit_head_alone(frozen, client, weights)
        else:
            start = split_head(zero_shot_head(frozen))
            samples, all_classes = (client.x, client.y, client.val_x, client.val_y), torch.ones(len(start.bias)) > 0
            head, _, gradient = fit_best_head(*samples, start, all_classes, weights)
        fitted = {**head._asdict(), "gradient": gradient}
        return {key: value.float() for key, value in fitted.items()}, local

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return x @ sent["weight"].mT + sent["bias"]

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        return {"remaining gradient": float(sent["gradient"])}

    name = "pooled"
    traits = Traits(
        needs=frozenset({"image"}), privacy=PrivacyTraits(centralised=True), classes=ClassTraits(multi_label=True)
    )
    send, aggregate, adapt = parts.send_all, parts.mean, parts.no_adaptation
