"""A client's change of what it was sent, its norm, and noise that covers it."""

from collections.abc import Mapping

import torch

from fedvlm.core import Tensors
from fedvlm.maths.noise import Draw, cover
from fedvlm.tensors import flat


def start(upload: Tensors, sent: Tensors) -> Tensors:
    """What each number of an upload is measured from: the value sent, or 0 if none was."""
    return {
        key: sent[key]
        if key in sent and sent[key].shape == value.shape and sent[key].dtype == value.dtype
        else torch.zeros_like(value)
        for key, value in upload.items()
        if value.is_floating_point()
    }


def change(upload: Tensors, sent: Tensors) -> Tensors:
    """How far the floating-point numbers of an upload are from where they start."""
    return {key: upload[key] - first for key, first in start(upload, sent).items()}


def apply(upload: Tensors, sent: Tensors, moved: Mapping[str, torch.Tensor]) -> Tensors:
    """The upload with another change."""
    first = start(upload, sent)
    return {**upload, **{key: first[key] + value for key, value in moved.items()}}


def norm(moved: Tensors) -> float:
    """Over all tensors at once."""
    return float(torch.linalg.vector_norm(flat(moved).double()))


def clip(moved: Tensors, most: float) -> Tensors:
    """Shortened to the norm `most` if it is longer, in its own direction."""
    length = norm(moved)
    if length <= most:
        return moved
    # A hair less, because rounding to float32 must not make the result longer than allowed.
    return {key: value * (most / length * (1 - 1e-6)) for key, value in moved.items()}


def add_noise(moved: Tensors, deviation: float, draw: Draw) -> Tensors:
    return {key: cover(moved[key], deviation, draw(*moved[key].shape)) for key in sorted(moved)}
