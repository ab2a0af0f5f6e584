"""CLIP-GDA at each client alone: a Gaussian discriminant of its samples, added to the zero-shot classifier.

Nothing is sent; an unseen client is zero-shot. Wang et al., A hard-to-beat baseline for training-free CLIP-based
adaptation, ICLR 2024.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, Tensors, Traits, register
from fedvlm.errors import SettingsError
from fedvlm.maths import gaussian_classes
from fedvlm.methods._heads import zero_shot_logits
from fedvlm.methods._settings import CheckedSettings

ALPHAS = tuple(10 ** (k / 2) for k in range(-8, 5))  # α of the paper: 1e-4 to 1e2


@register
@dataclass(frozen=True)
class ClipGDA(CheckedSettings):
    text: bool = True  # False: the discriminant alone, for encoders without text
    shrinkage: float = 1.0  # 1 is the paper's
    precision_factor: Literal["posterior", "dim"] = "posterior"  # of Σ⁻¹: N + d + 2, or the paper's d
    rounds: int = 0

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        if self.text and frozen.text is None:
            raise SettingsError("clip-gda.text is true, but the encoder has no text; set text = false")
        classes = len(frozen.classes)
        return {}, {"weight": torch.zeros(classes, frozen.dim), "bias": torch.zeros(classes)}

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        """Choose α on validation samples, or on training samples that are left out one by one."""
        classes, dim = len(frozen.classes), frozen.dim
        nothing = gaussian_classes.Moments(torch.zeros(classes), torch.zeros(classes, dim), torch.zeros(dim, dim))
        moments = gaussian_classes.posterior_moments(nothing, client.x, client.y, 0.0)
        rule = gaussian_classes.fit_discriminant(moments, gaussian_classes.ridge(moments, self.shrinkage))
        factor = dim / (moments.counts.sum() + dim + 2) if self.precision_factor == "dim" else 1.0
        if not self.text:
            return {"weight": factor * rule.weight, "bias": scale_bias(rule.bias, factor)}
        weight = torch.ones(len(client.y))
        leave_one_out = gaussian_classes.leave_one_out_logits(moments, rule, client.x, client.y, weight)
        visual_logits = factor * torch.cat([rule.logits(client.val_x), leave_one_out])
        text_logits = zero_shot_logits(frozen, torch.cat([client.val_x, client.x]))
        is_val = client.val_y >= 0
        is_used = torch.cat([is_val, (client.y >= 0) & ~is_val.any()])
        y = torch.cat([client.val_y, client.y])
        alphas = torch.tensor(ALPHAS)
        is_correct = (text_logits + alphas[:, None, None] * visual_logits).argmax(2) == y
        alpha = alphas[(is_correct & is_used).sum(1).argmax()]
        return {"weight": alpha * factor * rule.weight, "bias": scale_bias(rule.bias, alpha * factor)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        visual_logits = x @ local["weight"].mT + local["bias"]
        return visual_logits + zero_shot_logits(frozen, x) if self.text else visual_logits

    name = "clip-gda"
    traits = Traits(needs=frozenset({"image"}))
    send, update, aggregate = parts.send_all, parts.no_update, parts.mean


def scale_bias(bias: Tensor, factor: Tensor | float) -> Tensor:
    """Scale a bias; a class without samples stays ruled out."""
    absent = gaussian_classes.ABSENT_CLASS_LOGIT
    return torch.where(bias <= absent, absent, factor * bias)
