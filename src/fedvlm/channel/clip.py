"""A client's change of what it was sent, its norm, and noise that covers it."""

from collections.abc import Mapping

import torch

from fedvlm.core import Tensors
from fedvlm.maths.privacy import Draw, add_noise
from fedvlm.tensors import flatten


def start_values(upload: Tensors, sent: Tensors) -> Tensors:
    """What each number of an upload is measured from: the value sent, or 0 if none was."""
    return {
        key: sent[key]
        if key in sent and sent[key].shape == value.shape and sent[key].dtype == value.dtype
        else torch.zeros_like(value)
        for key, value in upload.items()
        if value.is_floating_point()
    }


def upload_change(upload: Tensors, sent: Tensors) -> Tensors:
    """How far the floating-point numbers of an upload are from where they start."""
    return {key: upload[key] - start for key, start in start_values(upload, sent).items()}


def apply_change(upload: Tensors, sent: Tensors, change: Mapping[str, torch.Tensor]) -> Tensors:
    """The upload with another change."""
    starts = start_values(upload, sent)
    return {**upload, **{key: starts[key] + value for key, value in change.items()}}


def change_norm(change: Tensors) -> float:
    """Over all tensors at once."""
    return float(torch.linalg.vector_norm(flatten(change).double()))


def clip_change(change: Tensors, max_norm: float) -> Tensors:
    """Shortened to the norm `most` if it is longer, in its own direction."""
    length = change_norm(change)
    if length <= max_norm:
        return change
    # A hair less, because rounding to float32 must not make the result longer than allowed.
    return {key: value * (max_norm / length * (1 - 1e-6)) for key, value in change.items()}


def add_change_noise(change: Tensors, std: float, draw: Draw) -> Tensors:
    return {key: add_noise(change[key], std, draw(*change[key].shape)) for key in sorted(change)}
