"""The steps of the channel: clip, noise and quantise.

A step encodes a client's change before it leaves the client and decodes it at the server. It bounds the norm that an
honest change can have after it, and says what a round costs in privacy.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.channel.settings import Channel, ChannelError
from fedvlm.core import Tensors
from fedvlm.maths.privacy import Draw, add_noise
from fedvlm.tensors import flatten

BLOCK_SIZE = 256  # values that share a scale, so that one large value spoils only its block
MAX_LEVEL = 127
MAX_RELATIVE_ERROR: float = BLOCK_SIZE**0.5 / (2 * MAX_LEVEL)  # of the norm, relative to a block's largest value
SCALE_SUFFIX = "/scale"
RESIDUAL_PREFIX = "left/"  # what rounding has left over, in a client's channel state


def start_values(upload: Tensors, sent: Tensors) -> Tensors:
    """Return what each value of an upload is measured from: the value sent, or 0 if none was."""
    return {
        key: sent[key]
        if key in sent and sent[key].shape == value.shape and sent[key].dtype == value.dtype
        else torch.zeros_like(value)
        for key, value in upload.items()
        if value.is_floating_point()
    }


def upload_change(upload: Tensors, sent: Tensors) -> Tensors:
    """Return the difference between the floating-point values of an upload and their start values."""
    return {key: upload[key] - start for key, start in start_values(upload, sent).items()}


def apply_change(upload: Tensors, sent: Tensors, change: Mapping[str, Tensor]) -> Tensors:
    """Return the upload with another change."""
    starts = start_values(upload, sent)
    return {**upload, **{key: starts[key] + value for key, value in change.items()}}


def change_norm(change: Tensors) -> float:
    """Return the norm over all tensors at once."""
    return float(torch.linalg.vector_norm(flatten(change).double()))


class Step(ABC):
    """One step that a client's change goes through; by itself it costs no privacy and needs no decoding."""

    @abstractmethod
    def encode(self, change: Tensors, state: Tensors, draw: Draw) -> tuple[Tensors, Tensors]:
        """Return the change as it travels, and what the client keeps for the next round."""

    def decode(self, encoded: Tensors) -> Tensors:
        """Return the change from what travelled."""
        return encoded

    @abstractmethod
    def bound(self, norm: float, n_values: int) -> float:
        """Return the largest norm that an honest change has after the step, from that before it."""

    def cost(self) -> float:
        """Return 1/z² of a round's Gaussian mechanism."""
        return 0.0


@dataclass(frozen=True)
class Clip(Step):
    """Shorten a change to a norm, in its own direction."""

    max_norm: float

    def encode(self, change: Tensors, state: Tensors, draw: Draw) -> tuple[Tensors, Tensors]:
        length = change_norm(change)
        if length <= self.max_norm:
            return change, state
        # A hair less, because rounding to float32 must not make the result longer than allowed.
        factor = self.max_norm / length * (1 - 1e-6)
        return {key: value * factor for key, value in change.items()}, state

    def bound(self, norm: float, n_values: int) -> float:
        return self.max_norm


@dataclass(frozen=True)
class Noise(Step):
    """Add Gaussian noise to every value."""

    multiplier: float  # z: its standard deviation as a multiple of the clip norm
    max_norm: float

    def encode(self, change: Tensors, state: Tensors, draw: Draw) -> tuple[Tensors, Tensors]:
        std = self.multiplier * self.max_norm
        return {key: add_noise(change[key], std, draw(*change[key].shape)) for key in sorted(change)}, state

    def bound(self, norm: float, n_values: int) -> float:
        """The norm of noise exceeds its mean by six standard deviations once in a billion uploads."""
        return norm * (1 + self.multiplier * (math.sqrt(n_values) + 6))

    def cost(self) -> float:
        return 1 / self.multiplier**2


@dataclass(frozen=True)
class Quantise(Step):
    """Round every value to 8 bits; the rounding error is added to the client's next change.

    Values are rounded in blocks, each with a scale of its own, so that rounding never moves a change by more than
    1/15 of its norm.
    """

    def encode(self, change: Tensors, state: Tensors, draw: Draw) -> tuple[Tensors, Tensors]:
        """Return int8 levels and one float32 scale per block, and the state with the rounding errors."""
        encoded, residuals = {}, {}
        for key, value in change.items():
            residual = state.get(RESIDUAL_PREFIX + key)
            total = value.float() if residual is None else value.float() + residual
            blocks = _to_blocks(total)
            scale = blocks.abs().amax(dim=1) / MAX_LEVEL
            levels = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
            levels = levels.clamp(-MAX_LEVEL, MAX_LEVEL).to(torch.int8)
            encoded[key] = levels.reshape(-1)[: total.numel()].reshape(total.shape)
            encoded[key + SCALE_SUFFIX] = scale
            residuals[RESIDUAL_PREFIX + key] = total - _from_levels(encoded[key], scale)
        return encoded, {**state, **residuals}

    def decode(self, encoded: Tensors) -> Tensors:
        """Return the change in float32; refuse levels and scales that do not belong together."""
        change = {}
        for key, levels in encoded.items():
            if key + SCALE_SUFFIX not in encoded:
                continue
            scale = encoded[key + SCALE_SUFFIX]
            is_valid = levels.dtype == torch.int8 and scale.shape == (-(-levels.numel() // BLOCK_SIZE),)
            if not is_valid or scale.dtype != torch.float32:
                raise ChannelError(
                    f"{key!r} came as {levels.dtype} {tuple(levels.shape)} with {scale.dtype} scales "
                    f"{tuple(scale.shape)}; 8-bit numbers with one float32 for {BLOCK_SIZE} are expected"
                )
            change[key] = _from_levels(levels, scale)
        return change

    def bound(self, norm: float, n_values: int) -> float:
        """Rounding, with the errors of earlier rounds, adds an eighth at most."""
        return norm * ((1 + MAX_RELATIVE_ERROR) / (1 - MAX_RELATIVE_ERROR))


def client_steps(channel: Channel) -> tuple[Step, ...]:
    """Return the steps of a channel at the client, in their order."""
    steps: list[Step] = [Clip(channel.clip)] if channel.clip else []
    if channel.noise_multiplier:
        steps.append(Noise(channel.noise_multiplier, channel.clip))
    if channel.quantise:
        steps.append(Quantise())
    return tuple(steps)


def max_change_norm(channel: Channel, n_values: int) -> float:
    """Return the largest norm that an honest change of this many values can have; infinite if any."""
    norm = math.inf
    for step in client_steps(channel):
        norm = step.bound(norm, n_values)
    return min(norm * (1 + 1e-5), channel.max_norm)


def _to_blocks(value: Tensor) -> Tensor:
    """(blocks, 256), the last one filled up with zeros."""
    values = value.reshape(-1)
    return torch.nn.functional.pad(values, (0, -len(values) % BLOCK_SIZE)).reshape(-1, BLOCK_SIZE)


def _from_levels(levels: Tensor, scale: Tensor) -> Tensor:
    values = _to_blocks(levels).float() * scale[:, None]
    return values.reshape(-1)[: levels.numel()].reshape(levels.shape)
