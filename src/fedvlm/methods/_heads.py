"""Linear heads: initial ones, zero-shot ones, and those of a client's own logistic regression."""

import torch
from torch import Tensor

from fedvlm import seeds
from fedvlm.core import Client, Frozen
from fedvlm.errors import SettingsError
from fedvlm.maths import gaussian_classes
from fedvlm.maths.logistic_regression import RIDGES, Head, RidgePath, fit_best_head, fit_ridge_path


def initial_head(head: str, frozen: Frozen) -> Tensor:
    """Return (classes, dim): the text embeddings, or short rows of random direction.

    Random rows of unit norm would be a wrong classifier to which each local map adapts in its own way, before the head
    has learnt anything that clients could share.
    """
    if head == "random":
        draw = torch.randn(len(frozen.classes), frozen.dim, generator=seeds.generator("head", frozen.seed))
        return 0.1 * torch.nn.functional.normalize(draw, dim=1)
    if head != "text":
        raise SettingsError(f"head must be 'text' or 'random', got {head!r}")
    if frozen.text is None:
        raise SettingsError("head = 'text', but the encoder has no text; set head = 'random'")
    return frozen.text


def zero_shot_logits(frozen: Frozen, x: Tensor) -> Tensor:
    """Return the (samples, classes) logits of the frozen class texts."""
    assert frozen.text is not None  # promised by `needs`, or checked by `init`
    return frozen.scale * x @ frozen.text.mT


def fit_local_path(frozen: Frozen, client: Client) -> tuple[Tensor, RidgePath, Tensor]:
    """Return the ridges, a head for each from the client's samples alone, and which classes it has samples of."""
    ridges, start = torch.tensor(RIDGES, dtype=torch.float64), _zero_head(frozen)
    has_samples = _has_samples(frozen, client)
    return ridges, fit_ridge_path(client.x, client.y, ridges, start, has_samples), has_samples


def fit_head_alone(frozen: Frozen, client: Client, class_weights: Tensor | None = None) -> tuple[Head, Tensor, Tensor]:
    """Return a head from the client's samples alone, its ridge and the remaining gradient; it names no other class."""
    samples, has_samples = (client.x, client.y, client.val_x, client.val_y), _has_samples(frozen, client)
    head, ridge, gradient = fit_best_head(*samples, _zero_head(frozen), has_samples, class_weights)
    return Head(head.weight, torch.where(has_samples, head.bias, gaussian_classes.ABSENT_CLASS_LOGIT)), ridge, gradient


def _zero_head(frozen: Frozen) -> Head:
    return Head(torch.zeros(len(frozen.classes), frozen.dim), torch.zeros(len(frozen.classes)))


def _has_samples(frozen: Frozen, client: Client) -> Tensor:
    return gaussian_classes.class_membership(client.y, len(frozen.classes)).sum(0) > 0
