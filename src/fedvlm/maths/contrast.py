"""CLIP's loss over a minibatch: an image is to find its own text, and a text its own image."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

MASKED_LOGIT = -1e9  # a logit that no softmax sees, yet finite, so that no gradient is NaN


def contrastive_loss(
    x: Tensor, text: Tensor, y: Tensor, real: Tensor, scale: float, mask_duplicates: bool = False
) -> Tensor:
    """The mean over real rows of both directions' cross-entropies.

    x (rows, dim) unit-norm features, text (classes, dim). Row j is paired with the text of its own
    class. Two rows of one class are each other's false opposites, so that the loss has a floor;
    `mask_duplicates` takes them out of the comparison.
    """
    logits = scale * x @ text[y].mT
    out = ~real[None, :]
    if mask_duplicates:
        is_self = torch.eye(len(y), dtype=torch.bool)
        out = out | ((y[:, None] == y[None, :]) & ~is_self)
    target = torch.arange(len(y))
    image_to_text = cross_entropy(logits.masked_fill(out, MASKED_LOGIT), target, reduction="none")
    text_to_image = cross_entropy(logits.mT.masked_fill(out, MASKED_LOGIT), target, reduction="none")
    losses = torch.where(real, image_to_text + text_to_image, 0.0)
    return losses.sum() / (2 * real.sum().clamp(min=1))
