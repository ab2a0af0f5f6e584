"""Run CLIP's ResNet image towers as a function of a state dict with OpenAI's names.

They have three convolutions in place of one at the start, average pooling before every strided convolution, and at the
end attention in place of a mean: the mean of the last feature map is the query, all its positions are keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, batch_norm, conv2d, linear, relu

Weights = Mapping[str, Tensor]
STRIDE = 32  # pixels per position of the last feature map, along an edge
HEAD = 64  # width of an attention head
STAGES = (1, 2, 3, 4)


@dataclass(frozen=True)
class Shape:
    """The shape of a tower, read from its state dict."""

    blocks: tuple[int, ...]  # of each stage
    width: int
    edge: int  # positions of the last feature map, along an edge
    dim: int

    @property
    def pixels(self) -> int:
        return STRIDE * self.edge

    @property
    def channels(self) -> int:
        """Return the channels of the last feature map."""
        return 32 * self.width


def shape_of(weights: Weights) -> Shape:
    """Read the shape; raise KeyError on a missing name and ValueError on a tower of another kind."""
    blocks = []
    for stage in STAGES:
        block_numbers = {key.split(".")[1] for key in weights if key.startswith(f"layer{stage}.")}
        if block_numbers != {str(number) for number in range(len(block_numbers))} or not block_numbers:
            raise KeyError(f"layer{stage}.{len(block_numbers)}.conv1.weight")
        blocks.append(len(block_numbers))
    places = weights["attnpool.positional_embedding"].shape[0] - 1
    edge = round(places**0.5)
    width = weights["layer1.0.conv1.weight"].shape[0]
    shape = Shape(tuple(blocks), width, edge, weights["attnpool.c_proj.weight"].shape[0])
    if edge**2 != places or weights["attnpool.q_proj.weight"].shape[0] != shape.channels:
        raise ValueError(f"its attention pool has {places} positions, which does not fit width {width}")
    if shape.channels % HEAD:
        raise ValueError(f"its width {width} is not divisible into attention heads of {HEAD}")
    return shape


def embed(weights: Weights, shape: Shape, pixels: Tensor, patches: bool) -> Tensor:
    """Return (images, 1, dim) pooled, or (images, 1 + positions, dim) with a query at every position."""
    x = pixels
    for number, stride in ((1, 2), (2, 1), (3, 1)):
        x = relu(_normed(weights, x, f"conv{number}", f"bn{number}", stride=stride, padding=1))
    x = avg_pool2d(x, 2)
    for stage, blocks in zip(STAGES, shape.blocks, strict=True):
        for number in range(blocks):
            stride = 2 if stage > 1 and number == 0 else 1
            x = _block(weights, f"layer{stage}.{number}.", x, stride)
    return _attention(weights, x.flatten(2).mT, shape.channels // HEAD, patches)


def _normed(weights: Weights, x: Tensor, conv: str, norm: str, stride: int = 1, padding: int = 0) -> Tensor:
    """Apply a convolution and its batch norm, with the statistics it was trained with."""
    x = conv2d(x, weights[f"{conv}.weight"], None, stride, padding)
    means, spread = weights[f"{norm}.running_mean"], weights[f"{norm}.running_var"]
    return batch_norm(x, means, spread, weights[f"{norm}.weight"], weights[f"{norm}.bias"])


def _block(weights: Weights, name: str, x: Tensor, stride: int) -> Tensor:
    inner = relu(_normed(weights, x, f"{name}conv1", f"{name}bn1"))
    inner = relu(_normed(weights, inner, f"{name}conv2", f"{name}bn2", padding=1))
    inner = avg_pool2d(inner, stride) if stride > 1 else inner
    inner = _normed(weights, inner, f"{name}conv3", f"{name}bn3")
    if f"{name}downsample.0.weight" in weights:
        x = avg_pool2d(x, stride) if stride > 1 else x
        x = _normed(weights, x, f"{name}downsample.0", f"{name}downsample.1")
    return relu(x + inner)


def _attention(weights: Weights, places: Tensor, heads: int, patches: bool) -> Tensor:
    """Pool (images, positions, channels) to (images, queries, dim)."""

    def project(x: Tensor, part: str) -> Tensor:
        return linear(x, weights[f"attnpool.{part}.weight"], weights[f"attnpool.{part}.bias"])

    def split(x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (heads, -1)).transpose(-2, -3)

    tokens = torch.cat([places.mean(1, keepdim=True), places], dim=1)
    tokens = tokens + weights["attnpool.positional_embedding"]
    queries = tokens if patches else tokens[:, :1]
    q, k, v = (split(project(x, part)) for x, part in ((queries, "q_proj"), (tokens, "k_proj"), (tokens, "v_proj")))
    attended = (q * HEAD**-0.5 @ k.mT).softmax(dim=-1) @ v
    return project(attended.transpose(-2, -3).flatten(-2), "c_proj")
