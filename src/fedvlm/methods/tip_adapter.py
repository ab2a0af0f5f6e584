"""Tip-Adapter at each client alone: votes of its nearest samples, added to the zero-shot classifier.

Nothing is sent; an unseen client is zero-shot. Zhang et al., Tip-Adapter: training-free adaption of CLIP for few-shot
classification, ECCV 2022.
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, Tensors, Traits, register
from fedvlm.maths import gaussian_classes
from fedvlm.methods._heads import zero_shot_logits
from fedvlm.methods._settings import CheckedSettings

# α and β of the paper; its defaults come first, and are used without validation samples
PAIRS = ((1.0, 5.5), *product((0.1, 0.3, 1.0, 3.0, 10.0), (1.0, 3.0, 10.0, 30.0)))


@register
@dataclass(frozen=True)
class TipAdapter(CheckedSettings):
    rounds: int = 0

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        none = torch.zeros(0, len(frozen.classes))
        return {}, {"samples": torch.zeros(0, frozen.dim), "labels": none, "pair": torch.zeros(2)}

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        """Keep the samples, and choose the pair with the highest accuracy on validation samples."""
        one_hot = gaussian_classes.class_membership(client.y, len(frozen.classes)).float()
        caches = [{"samples": client.x, "labels": one_hot, "pair": torch.tensor(pair)} for pair in PAIRS]
        if not len(client.val_y):
            return caches[0]
        predictions = [self.predict(frozen, sent, cache, client.val_x).argmax(1) for cache in caches]
        n_correct = torch.stack([(prediction == client.val_y).sum() for prediction in predictions])
        return {**caches[0], "pair": torch.tensor(PAIRS)[n_correct.argmax()]}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        alpha, beta = local["pair"].unbind()
        cache_logits: Tensor = (-beta * (1 - x @ local["samples"].mT)).exp() @ local["labels"]
        return zero_shot_logits(frozen, x) + alpha * cache_logits

    name = "tip-adapter"
    traits = Traits(needs=frozenset({"image", "text"}))
    send, update, aggregate = parts.send_all, parts.no_update, parts.mean
