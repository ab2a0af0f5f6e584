"""Each client on its own: the labels of its nearest rows, added to the zero-shot classifier.

Nothing is sent; an unseen client is zero-shot. Zhang et al., Tip-Adapter: training-free adaption
of CLIP for few-shot classification, ECCV 2022.
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, Tensors, Traits, register
from fedvlm.maths import gaussian_classes
from fedvlm.methods.clip_gda import zero_shot

# α and β of the paper; its defaults come first and stay if there are no validation rows
PAIRS = ((1.0, 5.5), *product((0.1, 0.3, 1.0, 3.0, 10.0), (1.0, 3.0, 10.0, 30.0)))


@register
@dataclass(frozen=True)
class TipAdapter:
    rounds: int = 0

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        none = torch.zeros(0, len(frozen.classes))
        return {}, {"rows": torch.zeros(0, frozen.dim), "labels": none, "pair": torch.zeros(2)}

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        """Keeps the rows, and takes the pair that is right most often on validation rows."""
        one_hot = gaussian_classes.class_membership(client.y, len(frozen.classes)).float()
        out = [{"rows": client.x, "labels": one_hot, "pair": torch.tensor(pair)} for pair in PAIRS]
        if not len(client.val_y):
            return out[0]
        logits = [self.predict(frozen, sent, one, client.val_x) for one in out]
        n_correct = torch.stack([(one.argmax(1) == client.val_y).sum() for one in logits])
        return {**out[0], "pair": torch.tensor(PAIRS)[n_correct.argmax()]}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        alpha, sharpness = local["pair"].unbind()
        cache_logits: Tensor = (-sharpness * (1 - x @ local["rows"].mT)).exp() @ local["labels"]
        return zero_shot(frozen, x) + alpha * cache_logits

    name = "tip-adapter"
    traits = Traits(needs=frozenset({"image", "text"}))
    send, update, aggregate = parts.send_all, parts.no_update, parts.mean
