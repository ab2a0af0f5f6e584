"""What TOFA tells beside its verbs: of an upload, for an audit; of a client, for the record."""

from typing import Any

import torch
from torch import Tensor

from fedvlm.core import Frozen, Tensors
from fedvlm.maths import calibration, gaussian_classes
from fedvlm.maths.privacy import spent
from fedvlm.methods._texts import class_texts


def noise(self: Any, frozen: Frozen) -> int:
    return gaussian_classes.count_noise_values(len(frozen.classes), frozen.dim) if self.noise_multiplier else 0


def covered_classes(self: Any, upload: Tensors) -> Tensor:
    """(classes,) True where the upload tells of rows of the class."""
    keys = {"counts", "holders", "voters"} & upload.keys()
    return torch.stack([upload[key] for key in keys]).sum(0) > 0


def class_means(self: Any, upload: Tensors) -> Tensor | None:
    """(classes, dim) what the upload says of the class means."""
    return gaussian_classes.class_means(upload, self.max_samples) if "sums" in upload else None


def describe(self: Any, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
    names = ("visual temperature", "text temperature")
    temperatures = dict(zip(names, local.get("heat", torch.zeros(0)).exp().tolist(), strict=False))
    return temperatures | spent(self.noise_multiplier, self.rounds, self.delta)


def initial_head(self: Any, frozen: Frozen, shared: Tensors) -> Tensor:
    """(classes, dim): what a head over scaled cosines can start from."""
    if not self.visual:
        return class_texts(frozen, shared)
    rule = shared["weight"], shared["bias"], shared["means"], shared["counts"] > 0
    return calibration.fold_bias(*rule) / frozen.scale
