"""Each client alone: logistic regression on its own samples, with the ridge chosen on validation samples.

Nothing is shared, so an unseen client has no classifier. It is the baseline that federation has to beat.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import ClassTraits, Client, Frozen, Tensors, Traits, register
from fedvlm.methods._heads import fit_head_alone
from fedvlm.methods._settings import LossSettings


@register
@dataclass(frozen=True)
class Alone(LossSettings):
    rounds: int = 1  # in which nothing is sent

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes = len(frozen.classes)
        head = {"weight": torch.zeros(classes, frozen.dim), "bias": torch.zeros(classes)}
        return {}, {**head, "ridge": torch.zeros(()), "gradient": torch.zeros(())}

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        head, ridge, gradient = fit_head_alone(frozen, client, parts.class_weights(self, len(frozen.classes), client))
        fitted = {**head._asdict(), "ridge": ridge, "gradient": gradient}
        return {key: value.float() for key, value in fitted.items()}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return x @ local["weight"].mT + local["bias"]

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        return {"ridge": float(local["ridge"]), "remaining gradient": float(local["gradient"])}

    name = "alone"
    traits = Traits(needs=frozenset({"image"}), classes=ClassTraits(multi_label=True))
    send, update, aggregate = parts.send_all, parts.no_update, parts.mean
