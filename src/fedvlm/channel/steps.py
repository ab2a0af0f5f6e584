"""The steps of the channel: clip, noise, quantise and the secure sum.

A step encodes a client's change before it leaves the client and decodes it at the server. It bounds the norm that an
honest change can have after it, and says what a round costs in privacy.

The secure sum in one process is a rehearsal of the arithmetic: numbers in fixed point, modulo 2^64, under masks that
two clients share and that cancel in the sum. It equals the plain sum to 2^-32 for each client, and the record and the
aggregate see what a server would see. Between machines, where masks have to be agreed on and sites drop out, it is
SecAgg+ of Flower, which silently cuts off numbers outside ±8: `check_limit` refuses them before.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm import seeds
from fedvlm.channel.settings import Channel, ChannelError
from fedvlm.core import Tensors
from fedvlm.errors import FederationError
from fedvlm.maths.privacy import Draw, add_noise
from fedvlm.tensors import flatten

BLOCK_SIZE = 256  # values that share a scale, so that one large value spoils only its block
MAX_LEVEL = 127
MAX_RELATIVE_ERROR: float = BLOCK_SIZE**0.5 / (2 * MAX_LEVEL)  # of the norm, relative to a block's largest value
SCALE_SUFFIX = "/scale"
RESIDUAL_PREFIX = "left/"  # what rounding has left over, in a client's channel state
FIXED_POINT_STEPS = 2.0**32  # steps of fixed point in 1
MAX_FIXED_POINT_SUM = 2.0**62  # a sum of fixed-point numbers stays below it; the rest is for sign and margin
MASK_NEIGHBOURS = 8  # clients on either side with which a client shares masks
WEIGHT_KEY = "channel/weight"  # weights travel inside the sum, not beside it
SECAGG_LIMIT = 8.0  # SecAgg+ silently cuts off larger numbers
SECAGG_MARGIN = 0.99


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


class Step(Protocol):
    """One step that a client's change goes through."""

    def encode(self, change: Tensors, state: Tensors, draw: Draw) -> tuple[Tensors, Tensors]:
        """Return the change as it travels, and what the client keeps for the next round."""
        ...

    def decode(self, encoded: Tensors) -> Tensors:
        """Return the change from what travelled."""
        ...

    def bound(self, norm: float, n_values: int) -> float:
        """Return the largest norm that an honest change has after the step, from that before it."""
        ...

    def cost(self, fraction: float) -> float:
        """Return 1/z² of a round's Gaussian mechanism; of a secure sum the client has a fraction."""
        ...


@dataclass(frozen=True)
class Clip:
    """Shorten a change to a norm, in its own direction."""

    max_norm: float

    def encode(self, change: Tensors, state: Tensors, draw: Draw) -> tuple[Tensors, Tensors]:
        length = change_norm(change)
        if length <= self.max_norm:
            return change, state
        # A hair less, because rounding to float32 must not make the result longer than allowed.
        factor = self.max_norm / length * (1 - 1e-6)
        return {key: value * factor for key, value in change.items()}, state

    def decode(self, encoded: Tensors) -> Tensors:
        return encoded

    def bound(self, norm: float, n_values: int) -> float:
        return self.max_norm

    def cost(self, fraction: float) -> float:
        return 0.0


@dataclass(frozen=True)
class Noise:
    """Add Gaussian noise to every value."""

    multiplier: float  # z: its standard deviation as a multiple of the clip norm
    max_norm: float

    def encode(self, change: Tensors, state: Tensors, draw: Draw) -> tuple[Tensors, Tensors]:
        std = self.multiplier * self.max_norm
        return {key: add_noise(change[key], std, draw(*change[key].shape)) for key in sorted(change)}, state

    def decode(self, encoded: Tensors) -> Tensors:
        return encoded

    def bound(self, norm: float, n_values: int) -> float:
        """The norm of noise exceeds its mean by six standard deviations once in a billion uploads."""
        return norm * (1 + self.multiplier * (math.sqrt(n_values) + 6))

    def cost(self, fraction: float) -> float:
        return fraction / self.multiplier**2


@dataclass(frozen=True)
class Quantise:
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

    def cost(self, fraction: float) -> float:
        return 0.0


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


@dataclass(frozen=True)
class SecureSum:
    """Show the server the sum of a round's uploads and no single upload; a rehearsal in one process."""

    seed_parts: Sequence[str | int]  # of the masks: whoever knows them can remove the masks

    def encode(
        self, uploads: Mapping[str, Tensors], weights: Mapping[str, float], context_of: Callable[[str], str]
    ) -> dict[str, Tensors]:
        """Return every client's weighted upload under its masks."""
        masked = {}
        for id, upload in uploads.items():
            weighted = weight_upload(upload, weights[id], context_of(id))
            integers = to_fixed_point(weighted, len(uploads), context_of(id))
            masked[id] = mask_upload(integers, list(uploads), id, self.seed_parts)
        return masked

    def decode(self, masked: Iterable[Tensors], is_total: bool, template: Tensors) -> Tensors:
        """Return what the aggregate gets in place of all uploads: their mean, or their total."""
        sums = sum_masked(masked)
        divisor = FIXED_POINT_STEPS * (1.0 if is_total else float(sums[WEIGHT_KEY]) / FIXED_POINT_STEPS)
        return {
            key: (sums[key].double() / divisor if value.is_floating_point() else sums[key]).to(value.dtype)
            for key, value in template.items()
        }


def weight_upload(upload: Tensors, weight: float, context: str) -> Tensors:
    """Return weight · upload, and the weight itself; integers are summed as they are."""
    weighted: Tensors = {WEIGHT_KEY: torch.tensor(weight, dtype=torch.float64)}
    for key, value in upload.items():
        if not value.is_floating_point() and weight != 1:
            raise FederationError(
                f"{context}: {key!r} holds integers, whose mean over samples is not an integer; "
                "set channel.secure = false"
            )
        weighted[key] = weight * value.double() if value.is_floating_point() else value
    return weighted


def check_limit(tensors: Tensors, limit: float, context: str) -> Tensors:
    """Refuse numbers that a masked sum would garble, while it is still known whose they are."""
    for key, value in tensors.items():
        is_outside = ~(value.double().abs() < limit)  # also where it is NaN
        if is_outside.any():
            raise FederationError(
                f"{context}: {int(is_outside.sum())} of {value.numel()} numbers of {key!r} (as "
                f"{value[is_outside].flatten()[0].item():.4g}) are outside ±{limit:.4g}, the range of the "
                "masked sum; set channel.clip, or lower the learning rate"
            )
    return tensors


def to_fixed_point(tensors: Tensors, clients: int, context: str) -> Tensors:
    """Return the tensors as integers, small enough for the sum over this many clients."""
    floats = {key: value for key, value in tensors.items() if value.is_floating_point()}
    integers = {key: value for key, value in tensors.items() if key not in floats}
    check_limit(floats, MAX_FIXED_POINT_SUM / FIXED_POINT_STEPS / clients, context)
    check_limit(integers, MAX_FIXED_POINT_SUM / clients, context)
    rounded = {key: (value * FIXED_POINT_STEPS).round() for key, value in floats.items()}
    return {key: value.to(torch.int64) for key, value in {**rounded, **integers}.items()}


def mask_upload(integers: Tensors, ids: Sequence[str], id: str, seed_parts: Sequence[str | int]) -> Tensors:
    """Return one client's integers under the masks it shares, modulo 2^64; they look random."""
    masked = {}
    for key, value in integers.items():
        values = _to_unsigned(value)
        for first, second in _mask_pairs(ids, id):
            rng = seeds.numbers("mask", *seed_parts, first, second, key)
            mask = rng.integers(0, 2**64, size=values.shape, dtype=np.uint64)
            values = values + mask if id == first else values - mask
        masked[key] = torch.from_numpy(np.asarray(values).astype(np.int64))
    return masked


def sum_masked(masked: Iterable[Tensors]) -> Tensors:
    """Return the sum of masked uploads in integers: the masks cancel."""
    sums: dict[str, NDArray[np.uint64]] = {}
    for upload in masked:
        for key, value in upload.items():
            sums[key] = sums[key] + _to_unsigned(value) if key in sums else _to_unsigned(value)
    return {key: torch.from_numpy(np.asarray(total).astype(np.int64)) for key, total in sums.items()}


def _to_unsigned(value: Tensor) -> NDArray[np.uint64]:
    return np.atleast_1d(value.numpy()).astype(np.uint64).reshape(value.shape)


def _mask_pairs(ids: Sequence[str], id: str) -> list[tuple[str, str]]:
    """The pairs of a client on a circle of all, as in SecAgg+: not every pair is needed."""
    ring = sorted(ids)
    position, count = ring.index(id), len(ring)
    neighbours = {ring[(position + offset) % count] for offset in range(-MASK_NEIGHBOURS, MASK_NEIGHBOURS + 1)} - {id}
    return [(min(id, neighbour), max(id, neighbour)) for neighbour in sorted(neighbours)]


def to_secagg(upload: Tensors, sent: Tensors, weight: float, channel: Channel, context: str) -> Tensors:
    """Return what a site gives to SecAgg+: its weighted change, scaled to the range, and its weight."""
    if integer_keys := [key for key, value in upload.items() if not value.is_floating_point()]:
        raise FederationError(
            f"{context}: {integer_keys[0]!r} holds integers, which SecAgg+ does not take; set channel.secure = false"
        )
    change = upload_change(upload, sent)
    factor = weight * _secagg_factor(change, channel)
    scaled = {key: factor * value.double() for key, value in change.items()}
    return check_limit({**scaled, WEIGHT_KEY: torch.tensor([weight], dtype=torch.float64)}, SECAGG_LIMIT, context)


def from_secagg(mean: Tensors, sent: Tensors, channel: Channel, context: str) -> Tensors:
    """Return the mean upload from the mean over sites of what they gave to SecAgg+."""
    change = {key: value for key, value in mean.items() if key != WEIGHT_KEY}
    factor = float(mean[WEIGHT_KEY]) * _secagg_factor(change, channel)
    change = {key: (value / factor).float() for key, value in change.items()}
    if (norm := change_norm(change)) > 2 * max_change_norm(channel, _count_values(change)):
        raise FederationError(
            f"{context}: by the sum the mean change of the clients has the norm {norm:.4g}, more than the channel "
            "allows a single one; a masked upload was damaged or forged"
        )
    return apply_change(change, sent, change)


def _secagg_factor(change: Tensors, channel: Channel) -> float:
    max_norm = max_change_norm(channel, _count_values(change))
    return SECAGG_MARGIN * SECAGG_LIMIT / max_norm if max_norm < math.inf else 1.0


def _count_values(change: Tensors) -> int:
    return sum(value.numel() for value in change.values())
