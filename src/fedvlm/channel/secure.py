"""The sum of the clients' uploads, and nothing else, for the server to see.

In one process this is a rehearsal of the arithmetic: numbers in fixed point, modulo 2^64, under
masks that two clients share and that cancel in the sum. It equals the plain sum to 2^-32 for each
client, and the record and the aggregate see what a server would see. Between machines, where
masks have to be agreed on and sites drop out, it is SecAgg+ of Flower, which takes numbers within
±8 and says nothing of those that are not: `guarded` refuses them before.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm import seeds
from fedvlm.channel.clip import apply_change, change_norm, upload_change
from fedvlm.channel.settings import Channel
from fedvlm.channel.validate import max_change_norm, validate
from fedvlm.core import Tensors
from fedvlm.errors import FederationError

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
    validate(change, (), context)
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
