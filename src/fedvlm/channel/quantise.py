"""Eight bits for each number of a change; what rounding leaves over is added the next time.

Numbers are rounded in blocks of 256, each with a scale of its own, so rounding never moves a
change by more than 1/15 of its norm, and one large number spoils only its block.
"""

import torch
from torch import Tensor

from fedvlm.channel.settings import ChannelError
from fedvlm.core import Tensors

BLOCK_SIZE = 256
MAX_LEVEL = 127
MAX_RELATIVE_ERROR = BLOCK_SIZE**0.5 / (
    2 * MAX_LEVEL
)  # largest error relative to a block's largest number, in the norm
SCALE_SUFFIX = "/scale"


def quantise_change(change: Tensors, residuals: Tensors) -> tuple[Tensors, Tensors]:
    """What travels (int8 and one float32 scale per block), and what is left over by key."""
    encoded, new_residuals = {}, {}
    for key, value in change.items():
        total = value.float() + residuals[key] if key in residuals else value.float()
        blocks = _to_blocks(total)
        scale = blocks.abs().amax(dim=1) / MAX_LEVEL
        levels = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
        levels = levels.clamp(-MAX_LEVEL, MAX_LEVEL).to(torch.int8)
        encoded[key] = levels.reshape(-1)[: total.numel()].reshape(total.shape)
        encoded[key + SCALE_SUFFIX] = scale
        new_residuals[key] = total - _from_levels(encoded[key], scale)
    return encoded, new_residuals


def dequantise_change(encoded: Tensors, keys: list[str]) -> Tensors:
    """The changes by key, in float32; refused where levels and scales are not of one tensor."""
    for key in keys:
        levels, scale = encoded[key], encoded[key + SCALE_SUFFIX]
        is_valid = levels.dtype == torch.int8 and scale.shape == (-(-levels.numel() // BLOCK_SIZE),)
        if not is_valid or scale.dtype != torch.float32:
            raise ChannelError(
                f"{key!r} came as {levels.dtype} {tuple(levels.shape)} with {scale.dtype} scales "
                f"{tuple(scale.shape)}; 8-bit numbers with one float32 for {BLOCK_SIZE} are expected"
            )
    return {key: _from_levels(encoded[key], encoded[key + SCALE_SUFFIX]) for key in keys}


def _to_blocks(value: Tensor) -> Tensor:
    """(blocks, 256), the last one filled up with zeros."""
    numbers = value.reshape(-1)
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % BLOCK_SIZE)).reshape(-1, BLOCK_SIZE)


def _from_levels(levels: Tensor, scale: Tensor) -> Tensor:
    values = _to_blocks(levels).float() * scale[:, None]
    return values.reshape(-1)[: levels.numel()].reshape(levels.shape)
