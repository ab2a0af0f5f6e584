"""Standard bodies a method names: `update = parts.sgd`, `aggregate = parts.mean`, ..."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedvlm.core import Batch, Client, Frozen, Method, Tensors, setting, sums_uploads
from fedvlm.maths.gaussian_classes import balanced_weights, suppress_small_classes
from fedvlm.tensors import to_float32

__all__ = [
    "class_weights",
    "cross_entropy",
    "masked_cross_entropy",
    "mean",
    "minibatch",
    "no_adaptation",
    "no_update",
    "send_all",
    "suppress_client_classes",
    "uniform_mean",
]


def masked_cross_entropy(logits: Tensor, y: Tensor, real: Tensor) -> Tensor:
    """Return the mean cross-entropy over real samples, times their weights if `real` has weights; 0 if there are none.

    With a leading axis of clients it is the sum of theirs, so that each has its own gradient.
    """
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    losses = torch.where(real > 0, losses.reshape(y.shape), 0.0)
    losses = losses * real if real.is_floating_point() else losses
    return (losses.sum(dim=-1) / (real > 0).sum(dim=-1).clamp(min=1)).sum()


def class_weights(self: Any, classes: int, client: Client) -> Tensor | None:
    """Return (..., classes) the weights of classes in a client's loss; None if all samples count alike."""
    return balanced_weights(client.y, classes) if setting(self, "class_weights") == "balanced" else None


def cross_entropy(self: Any, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
    """loss: the cross-entropy of what the method predicts."""
    return masked_cross_entropy(self.predict(frozen, shared, local, batch.x), batch.y, batch.real)


def minibatch(client: Client, step: int) -> Batch:
    """Return the minibatch of a step, with labels clamped and padding marked as not real."""
    rows = client.order[step]
    real = rows >= 0
    rows = rows.clamp(min=0)
    reference_rows = client.reference_order[step].clamp(min=0)
    reference = to_float32(client.reference[reference_rows])
    return Batch(to_float32(client.x[rows]), client.y[rows].clamp(min=0), real, reference)


def suppress_client_classes(client: Client, counts: Tensor, smallest: int) -> Client:
    """Return the client without the samples of classes whose `counts` are below the minimum.

    Sums over the rows that are left say nothing of the others, and clients' sums add up to those
    over all rows that were left.
    """
    return replace(client, y=suppress_small_classes(client.y, counts, smallest))


def send_all(self: Any, shared: Tensors, id: str) -> Tensors:
    """send: every client gets all that is shared."""
    return shared


def no_adaptation(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
    """adapt: local tensors stay as they are after the rounds."""
    return local


def adapts(method: Method) -> bool:
    """Tell whether a method adapts after the rounds."""
    return type(method).adapt is not no_adaptation


@sums_uploads("samples")
def mean(self: Any, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
    """aggregate: the mean of the uploads, weighted by the clients' samples."""
    fractions = weights.double() / weights.double().sum()
    zero, pairs = torch.zeros((), dtype=torch.float64), list(zip(fractions, uploads, strict=True))
    sums = {key: sum((w * upload[key].double() for w, upload in pairs), start=zero) for key in shared}
    return {key: sums[key].to(value.dtype) for key, value in shared.items()}


@sums_uploads("clients")
def uniform_mean(
    self: Any, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]
) -> Tensors:
    """aggregate: the unweighted mean of the uploads."""
    return mean(self, shared, uploads, torch.ones_like(weights), ids)


def no_update(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
    """update: nothing is trained (methods with rounds = 0)."""
    return sent, local
