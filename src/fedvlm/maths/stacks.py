"""`layers.through` and its gradients for clients side by side, written out instead of autograd.

Every tensor has a leading axis of clients. Layers are "linear", "norm", "leaky" and "relu".
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from fedvlm.core import Tensors
from fedvlm.maths.layers import Layers
from fedvlm.maths.reversal import BATCH_NORM_EPSILON, BATCH_NORM_MOMENTUM

NEGATIVE_SLOPES = {"leaky": 0.01, "relu": 0.0}  # of an activation below 0
SavedTensors = tuple[Tensor, ...]  # what a layer's gradient needs of its way forth


class BatchNormWeights(NamedTuple):
    """How much each row says to BatchNorm's statistics."""

    rows: Tensor  # (clients, rows): 1 / count where a row is real
    has_variance: Tensor  # (clients, 1, 1) whether there are two real rows, which have a variance
    unbiased: Tensor  # (clients, 1, 1): count / (count - 1)


def batch_norm_weights(real: Tensor, dtype: torch.dtype) -> BatchNormWeights:
    count = real.sum(1)
    some = count.clamp(min=1).to(dtype)[:, None]
    unbiased = some / (count[:, None] - 1).clamp(min=1)
    return BatchNormWeights(real / some, (count > 1)[:, None, None], unbiased[..., None])


def forward(
    layers: Layers, name: str, parameters: Tensors, x: Tensor, norm_weights: BatchNormWeights
) -> tuple[Tensor, list[SavedTensors], Tensors]:
    """What comes out, what the way back needs, and the new statistics of BatchNorms."""
    saved: list[SavedTensors] = []
    new: Tensors = {}
    for place, layer in enumerate(layers):
        prefix = f"{name}{place}"
        if layer in NEGATIVE_SLOPES:
            x = leaky_relu(x, NEGATIVE_SLOPES[layer])
            saved.append((x,))
            continue
        weight, bias = parameters[f"{prefix}.weight"], parameters[f"{prefix}.bias"][:, None]
        if layer == "linear":
            saved.append((x,))
            if weight.shape[1] == 1:  # a product of one column rounds otherwise for one client
                x = (x * weight).sum(2, keepdim=True) + bias
            else:
                x = torch.baddbmm(bias, x, weight.mT)
            continue
        old = parameters[f"{prefix}.mean"][:, None], parameters[f"{prefix}.variance"][:, None]
        sample_weights = norm_weights.rows[:, None]
        mean = torch.where(norm_weights.has_variance, torch.bmm(sample_weights, x), old[0])
        normalised = x - mean
        variance = torch.where(norm_weights.has_variance, torch.bmm(sample_weights, normalised.square()), old[1])
        scale = torch.rsqrt(variance + BATCH_NORM_EPSILON)
        saved.append((normalised.mul_(scale), scale))
        x = torch.addcmul(bias, normalised, weight[:, None])
        # Without enough rows both ends are the same, and nothing moves.
        new[f"{prefix}.mean"] = torch.lerp(old[0], mean, BATCH_NORM_MOMENTUM)[:, 0]
        new[f"{prefix}.variance"] = torch.lerp(old[1], variance * norm_weights.unbiased, BATCH_NORM_MOMENTUM)[:, 0]
    return x, saved, new


def backward(
    layers: Layers,
    name: str,
    parameters: Tensors,
    saved: Sequence[SavedTensors],
    gradient: Tensor,
    norm_weights: BatchNormWeights,
    gradients: Tensors,
    needs_input_gradient: bool = True,
) -> Tensor:
    """Writes the gradients of a stack into `slopes`, given that of what comes out of it.

    Returns the gradient of what went in, if `inward`. A bias before BatchNorm has none: its
    place in `slopes` stays as it is.
    """
    sample_weights = norm_weights.rows[..., None] * norm_weights.has_variance
    for place in reversed(range(len(layers))):
        layer, prefix = layers[place], f"{name}{place}"
        if layer in NEGATIVE_SLOPES:
            (out,) = saved[place]
            gradient = torch.ops.aten.leaky_relu_backward(gradient, out, NEGATIVE_SLOPES[layer], True)
            continue
        weight = parameters[f"{prefix}.weight"]
        if layer == "norm":
            normalised, scale = saved[place]
            shift, stretch = gradient.sum(1, keepdim=True), (gradient * normalised).sum(1, keepdim=True)
            gradients[f"{prefix}.bias"].copy_(shift[:, 0])
            gradients[f"{prefix}.weight"].copy_(stretch[:, 0])
            common = torch.addcmul(shift, normalised, stretch)
            gradient = torch.addcmul(gradient, common, sample_weights, value=-1).mul_(scale * weight[:, None])
            continue
        torch.bmm(gradient.mT, saved[place][0], out=gradients[f"{prefix}.weight"])
        if layers[place + 1 : place + 2] != ("norm",):
            torch.sum(gradient, 1, out=gradients[f"{prefix}.bias"])
        if place or needs_input_gradient:
            gradient = torch.bmm(gradient, weight)
    return gradient
