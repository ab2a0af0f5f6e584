"""Each client on its own: logistic regression on its rows, the ridge chosen on validation rows.

Nothing is shared, so a client nobody has seen has no classifier. What federation is measured by.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, Tensors, Traits, register
from fedvlm.maths import gaussian_classes, logistic_regression


@register
@dataclass(frozen=True)
class Alone:
    rounds: int = 1  # in which nothing travels

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes = len(frozen.classes)
        return {}, {
            "weight": torch.zeros(classes, frozen.dim),
            "bias": torch.zeros(classes),
            "ridge": torch.zeros(()),
            "slope": torch.zeros(()),
        }

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        ridges, path, has_samples = fit_local_path(frozen, client)
        best = logistic_regression.select_ridge(path, ridges, client.val_x, client.val_y)
        bias = torch.where(has_samples, path.heads.bias, gaussian_classes.ABSENT_CLASS_LOGIT)
        fitted = {"weight": path.heads.weight, "bias": bias, "ridge": ridges, "slope": path.max_gradient}
        return {key: value[best].float() for key, value in fitted.items()}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return x @ local["weight"].mT + local["bias"]

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        return {"ridge": float(local["ridge"]), "slope left": float(local["slope"])}

    name = "alone"
    traits = Traits(needs=frozenset({"image"}))
    send, update, aggregate = parts.send_all, parts.no_update, parts.mean


def fit_local_path(frozen: Frozen, client: Client) -> tuple[Tensor, logistic_regression.RidgePath, Tensor]:
    """The ridges, a head for each from the client's rows alone, and which classes it has."""
    classes = len(frozen.classes)
    ridges = torch.tensor(logistic_regression.RIDGES, dtype=torch.float64)
    nothing = logistic_regression.Head(torch.zeros(classes, frozen.dim), torch.zeros(classes))
    has_samples = gaussian_classes.class_membership(client.y, classes).sum(0) > 0
    return ridges, logistic_regression.fit_ridge_path(client.x, client.y, ridges, nothing, has_samples), has_samples
