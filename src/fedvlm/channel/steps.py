"""A client's change of what it was sent, its norm, and noise that covers it."""

import math
from collections.abc import Iterable, Mapping, Sequence

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


def start_values(upload: Tensors, sent: Tensors) -> Tensors:
    """What each number of an upload is measured from: the value sent, or 0 if none was."""
    return {
        key: sent[key]
        if key in sent and sent[key].shape == value.shape and sent[key].dtype == value.dtype
        else torch.zeros_like(value)
        for key, value in upload.items()
        if value.is_floating_point()
    }


def upload_change(upload: Tensors, sent: Tensors) -> Tensors:
    """How far the floating-point numbers of an upload are from where they start."""
    return {key: upload[key] - start for key, start in start_values(upload, sent).items()}


def apply_change(upload: Tensors, sent: Tensors, change: Mapping[str, torch.Tensor]) -> Tensors:
    """The upload with another change."""
    starts = start_values(upload, sent)
    return {**upload, **{key: starts[key] + value for key, value in change.items()}}


def change_norm(change: Tensors) -> float:
    """Over all tensors at once."""
    return float(torch.linalg.vector_norm(flatten(change).double()))


def clip_change(change: Tensors, max_norm: float) -> Tensors:
    """Shortened to the norm `most` if it is longer, in its own direction."""
    length = change_norm(change)
    if length <= max_norm:
        return change
    # A hair less, because rounding to float32 must not make the result longer than allowed.
    return {key: value * (max_norm / length * (1 - 1e-6)) for key, value in change.items()}


def add_change_noise(change: Tensors, std: float, draw: Draw) -> Tensors:
    return {key: add_noise(change[key], std, draw(*change[key].shape)) for key in sorted(change)}


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


FIXED_POINT_STEPS = 2.0**32  # steps of fixed point in 1
MAX_FIXED_POINT_SUM = 2.0**62  # a sum of fixed-point numbers stays below it; the rest is for sign and margin
MASK_NEIGHBOURS = 8  # clients on either side with which a client shares masks
WEIGHT_KEY = "channel/weight"  # counts travel inside the sum, not beside it
SECAGG_LIMIT = 8.0  # SecAgg+ cuts larger numbers off, silently
SECAGG_MARGIN = 0.99


def weight_upload(upload: Tensors, weight: float, context: str) -> Tensors:
    """weight · upload, and the weight itself; whole numbers are summed as they are."""
    out: Tensors = {WEIGHT_KEY: torch.tensor(weight, dtype=torch.float64)}
    for key, value in upload.items():
        if not value.is_floating_point() and weight != 1:
            raise FederationError(
                f"{context}: {key!r} holds whole numbers, whose mean over rows is not one; set channel.secure = false"
            )
        out[key] = weight * value.double() if value.is_floating_point() else value
    return out


def check_limit(tensors: Tensors, limit: float, context: str) -> Tensors:
    """Refuses numbers a masked sum would garble, while it is still known whose they are."""
    for key, value in tensors.items():
        is_outside = ~(value.double().abs() < limit)  # also where it is NaN
        if is_outside.any():
            raise FederationError(
                f"{context}: {int(is_outside.sum())} of {value.numel()} numbers of {key!r} (as "
                f"{value[is_outside].flatten()[0].item():.4g}) are outside ±{limit:.4g}, the range of the "
                "masked sum; set channel.clip, or lower the rate"
            )
    return tensors


def to_fixed_point(tensors: Tensors, clients: int, context: str) -> Tensors:
    """In whole numbers, small enough for the sum over so many clients."""
    floats = {key: value for key, value in tensors.items() if value.is_floating_point()}
    integers = {key: value for key, value in tensors.items() if key not in floats}
    check_limit(floats, MAX_FIXED_POINT_SUM / FIXED_POINT_STEPS / clients, context)
    check_limit(integers, MAX_FIXED_POINT_SUM / clients, context)
    steps = {key: (value * FIXED_POINT_STEPS).round() for key, value in floats.items()}
    return {key: value.to(torch.int64) for key, value in {**steps, **integers}.items()}


def mask_upload(integers: Tensors, ids: Sequence[str], id: str, seed_parts: Sequence[str | int]) -> Tensors:
    """One client's whole numbers under the masks it shares, modulo 2^64; they look random.

    A rehearsal: masks are by the run's seed, and whoever knows it can take them off.
    """
    out = {}
    for key, value in integers.items():
        values = _to_unsigned(value)
        for a, b in _mask_pairs(ids, id):
            rng = seeds.numbers("mask", *seed_parts, a, b, key)
            shared = rng.integers(0, 2**64, size=values.shape, dtype=np.uint64)
            values = values + shared if id == a else values - shared
        out[key] = torch.from_numpy(np.asarray(values).astype(np.int64))
    return out


def sum_masked(masked: Iterable[Tensors]) -> Tensors:
    """The sum of what the clients have masked, in whole numbers: the masks cancel."""
    sums: dict[str, NDArray[np.uint64]] = {}
    for part in masked:
        for key, value in part.items():
            sums[key] = sums[key] + _to_unsigned(value) if key in sums else _to_unsigned(value)
    return {key: torch.from_numpy(np.asarray(part).astype(np.int64)) for key, part in sums.items()}


def _to_unsigned(value: Tensor) -> NDArray[np.uint64]:
    return np.atleast_1d(value.numpy()).astype(np.uint64).reshape(value.shape)


def _mask_pairs(ids: Sequence[str], id: str) -> list[tuple[str, str]]:
    """The pairs of a client on a circle of all, as in SecAgg+: no need for every pair."""
    ring = sorted(ids)
    position, count = ring.index(id), len(ring)
    neighbours = {ring[(position + step) % count] for step in range(-MASK_NEIGHBOURS, MASK_NEIGHBOURS + 1)} - {id}
    return [(min(id, neighbour), max(id, neighbour)) for neighbour in sorted(neighbours)]


def from_fixed_point(sums: Tensors, kind: str, like: Tensors) -> Tensors:
    """What the aggregate gets in place of all uploads: their mean, or for "total" their sum."""
    weight = float(sums[WEIGHT_KEY]) / FIXED_POINT_STEPS
    divisor = 1.0 if kind == "total" else weight
    return {
        key: (sums[key].double() / (FIXED_POINT_STEPS * divisor) if template.is_floating_point() else sums[key]).to(
            template.dtype
        )
        for key, template in like.items()
    }


def to_secagg(upload: Tensors, sent: Tensors, weight: float, channel: Channel, context: str) -> Tensors:
    """What a site gives to SecAgg+: its weighted change, stretched to the range, and its weight."""
    if integer_keys := [key for key, value in upload.items() if not value.is_floating_point()]:
        raise FederationError(
            f"{context}: {integer_keys[0]!r} holds whole numbers, which SecAgg+ does not take; set "
            "channel.secure = false"
        )
    change = upload_change(upload, sent)
    factor = weight * _secagg_factor(change, channel)
    out = {key: factor * value.double() for key, value in change.items()}
    return check_limit({**out, WEIGHT_KEY: torch.tensor([weight], dtype=torch.float64)}, SECAGG_LIMIT, context)


def from_secagg(mean: Tensors, sent: Tensors, channel: Channel, context: str) -> Tensors:
    """The mean upload, from the mean over sites of what they gave to SecAgg+."""
    change = {key: value for key, value in mean.items() if key != WEIGHT_KEY}
    factor = float(mean[WEIGHT_KEY]) * _secagg_factor(change, channel)
    change = {key: (value / factor).float() for key, value in change.items()}
    if (length := change_norm(change)) > 2 * max_change_norm(channel, _count_values(change)):
        raise FederationError(
            f"{context}: the sum says that the clients moved by {length:.4g} on average, more than "
            "the channel allows one; a masked upload was damaged or forged"
        )
    return apply_change(change, sent, change)


def _secagg_factor(change: Tensors, channel: Channel) -> float:
    max_norm = max_change_norm(channel, _count_values(change))
    return SECAGG_MARGIN * SECAGG_LIMIT / max_norm if max_norm < float("inf") else 1.0


def _count_values(change: Tensors) -> int:
    return sum(value.numel() for value in change.values())


def max_change_norm(channel: Channel, n_values: int) -> float:
    """The largest norm that an honest change of this many numbers can have; infinite if any.

    The norm of noise passes its mean by six deviations once in a billion uploads. Rounding to 8
    bits, with what earlier rounds left over, adds an eighth at most.
    """
    if not channel.clip:
        return channel.max_norm
    max_norm = channel.clip * (1 + channel.noise_multiplier * (math.sqrt(n_values) + 6))
    if channel.quantise:
        max_norm *= (1 + MAX_RELATIVE_ERROR) / (1 - MAX_RELATIVE_ERROR)
    return min(max_norm * (1 + 1e-5), channel.max_norm)
