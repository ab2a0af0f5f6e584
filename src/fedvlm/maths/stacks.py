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
from fedvlm.maths.reversal import EPSILON, FRESH

SLOPES = {"leaky": 0.01, "relu": 0.0}  # of an activation below 0
Kept = tuple[Tensor, ...]  # what a layer's gradient needs of its way forth


class Shares(NamedTuple):
    """How much each row says to BatchNorm's statistics."""

    rows: Tensor  # (clients, rows): 1 / count where a row is real
    enough: Tensor  # (clients, 1, 1) whether there are two real rows, which have a variance
    unbiased: Tensor  # (clients, 1, 1): count / (count - 1)


def shares(real: Tensor, dtype: torch.dtype) -> Shares:
    count = real.sum(1)
    some = count.clamp(min=1).to(dtype)[:, None]
    unbiased = some / (count[:, None] - 1).clamp(min=1)
    return Shares(real / some, (count > 1)[:, None, None], unbiased[..., None])


def forth(
    layers: Layers, name: str, every: Tensors, x: Tensor, by: Shares
) -> tuple[Tensor, list[Kept], Tensors]:
    """What comes out, what the way back needs, and the new statistics of BatchNorms."""
    kept: list[Kept] = []
    new: Tensors = {}
    for place, layer in enumerate(layers):
        at = f"{name}{place}"
        if layer in SLOPES:
            x = leaky_relu(x, SLOPES[layer])
            kept.append((x,))
            continue
        weight, bias = every[f"{at}.weight"], every[f"{at}.bias"][:, None]
        if layer == "linear":
            kept.append((x,))
            if weight.shape[1] == 1:  # a product of one column rounds otherwise for one client
                x = (x * weight).sum(2, keepdim=True) + bias
            else:
                x = torch.baddbmm(bias, x, weight.mT)
            continue
        old = every[f"{at}.mean"][:, None], every[f"{at}.variance"][:, None]
        share = by.rows[:, None]
        mean = torch.where(by.enough, torch.bmm(share, x), old[0])
        straight = x - mean
        variance = torch.where(by.enough, torch.bmm(share, straight.square()), old[1])
        scale = torch.rsqrt(variance + EPSILON)
        kept.append((straight.mul_(scale), scale))
        x = torch.addcmul(bias, straight, weight[:, None])
        # Without enough rows both ends are the same, and nothing moves.
        new[f"{at}.mean"] = torch.lerp(old[0], mean, FRESH)[:, 0]
        new[f"{at}.variance"] = torch.lerp(old[1], variance * by.unbiased, FRESH)[:, 0]
    return x, kept, new


def back(
    layers: Layers,
    name: str,
    every: Tensors,
    kept: Sequence[Kept],
    slope: Tensor,
    by: Shares,
    slopes: Tensors,
    inward: bool = True,
) -> Tensor:
    """Writes the gradients of a stack into `slopes`, given that of what comes out of it.

    Returns the gradient of what went in, if `inward`. A bias before BatchNorm has none: its
    place in `slopes` stays as it is.
    """
    share = by.rows[..., None] * by.enough
    for place in reversed(range(len(layers))):
        layer, at = layers[place], f"{name}{place}"
        if layer in SLOPES:
            (out,) = kept[place]
            slope = torch.ops.aten.leaky_relu_backward(slope, out, SLOPES[layer], True)
            continue
        weight = every[f"{at}.weight"]
        if layer == "norm":
            straight, scale = kept[place]
            shift, stretch = slope.sum(1, keepdim=True), (slope * straight).sum(1, keepdim=True)
            slopes[f"{at}.bias"].copy_(shift[:, 0])
            slopes[f"{at}.weight"].copy_(stretch[:, 0])
            common = torch.addcmul(shift, straight, stretch)
            slope = torch.addcmul(slope, common, share, value=-1).mul_(scale * weight[:, None])
            continue
        torch.bmm(slope.mT, kept[place][0], out=slopes[f"{at}.weight"])
        if layers[place + 1 : place + 2] != ("norm",):
            torch.sum(slope, 1, out=slopes[f"{at}.bias"])
        if place or inward:
            slope = torch.bmm(slope, weight)
    return slope
