"""Linear heads: initial ones, zero-shot ones, and those of a client's own logistic regression."""

import torch
from torch import Tensor

from fedvlm import seeds
from fedvlm.core import Client, Frozen
from fedvlm.errors import SettingsError
from fedvlm.maths import gaussian_classes
from fedvlm.maths.logistic_regression import RIDGES, Head, RidgePath, fit_ridge_path


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
    classes = len(frozen.classes)
    ridges = torch.tensor(RIDGES, dtype=torch.float64)
    nothing = Head(torch.zeros(classes, frozen.dim), torch.zeros(classes))
    has_samples = gaussian_classes.class_membership(client.y, classes).sum(0) > 0
    return ridges, fit_ridge_path(client.x, client.y, ridges, nothing, has_samples), has_samples
