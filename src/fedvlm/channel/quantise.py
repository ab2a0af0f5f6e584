"""Eight bits for each number of a change; what rounding leaves over is added the next time.

Numbers are rounded in blocks of 256, each with a scale of its own, so rounding never moves a
change by more than 1/15 of its norm, and one large number spoils only its block.
"""

import torch
from torch import Tensor

from fedvlm.channel.settings import ChannelError
from fedvlm.core import Tensors

BLOCK = 256
LEVELS = 127
LOSS = BLOCK**0.5 / (2 * LEVELS)  # largest error relative to a block's largest number, in the norm
SCALE = "/scale"


def quantise(moved: Tensors, left: Tensors) -> tuple[Tensors, Tensors]:
    """What travels (int8 and one float32 scale per block), and what is left over by key."""
    travels, over = {}, {}
    for key, value in moved.items():
        whole = value.float() + left[key] if key in left else value.float()
        blocks = _blocks(whole)
        scale = blocks.abs().amax(dim=1) / LEVELS
        levels = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
        levels = levels.clamp(-LEVELS, LEVELS).to(torch.int8)
        travels[key] = levels.reshape(-1)[: whole.numel()].reshape(whole.shape)
        travels[key + SCALE] = scale
        over[key] = whole - _values(travels[key], scale)
    return travels, over


def dequantise(travels: Tensors, keys: list[str]) -> Tensors:
    """The changes by key, in float32; refused where levels and scales are not of one tensor."""
    for key in keys:
        levels, scale = travels[key], travels[key + SCALE]
        fits = levels.dtype == torch.int8 and scale.shape == (-(-levels.numel() // BLOCK),)
        if not fits or scale.dtype != torch.float32:
            raise ChannelError(
                f"{key!r} came as {levels.dtype} {tuple(levels.shape)} with {scale.dtype} scales "
                f"{tuple(scale.shape)}; 8-bit numbers with one float32 for {BLOCK} are expected"
            )
    return {key: _values(travels[key], travels[key + SCALE]) for key in keys}


def _blocks(value: Tensor) -> Tensor:
    """(blocks, 256), the last one filled up with zeros."""
    numbers = value.reshape(-1)
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % BLOCK)).reshape(-1, BLOCK)


def _values(levels: Tensor, scale: Tensor) -> Tensor:
    whole = _blocks(levels).float() * scale[:, None]
    return whole.reshape(-1)[: levels.numel()].reshape(levels.shape)
