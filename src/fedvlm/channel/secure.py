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
from fedvlm.channel.clip import apply, change, norm
from fedvlm.channel.settings import Channel
from fedvlm.channel.validate import longest, validate
from fedvlm.core import Tensors
from fedvlm.errors import FederationError

FRACTION = 2.0**32  # steps of fixed point in 1
ROOM = 2.0**62  # a sum of fixed-point numbers stays below it; the rest is for sign and margin
NEIGHBOURS = 8  # clients on either side with which a client shares masks
WEIGHT = "channel/weight"  # counts travel inside the sum, not beside it
SECAGG = 8.0  # SecAgg+ cuts larger numbers off, silently
MARGIN = 0.99


def weighted(upload: Tensors, weight: float, where: str) -> Tensors:
    """weight · upload, and the weight itself; whole numbers are summed as they are."""
    out: Tensors = {WEIGHT: torch.tensor(weight, dtype=torch.float64)}
    for key, value in upload.items():
        if not value.is_floating_point() and weight != 1:
            raise FederationError(
                f"{where}: {key!r} holds whole numbers, whose mean over rows is not one; "
                "set channel.secure = false"
            )
        out[key] = weight * value.double() if value.is_floating_point() else value
    return out


def guarded(tensors: Tensors, most: float, where: str) -> Tensors:
    """Refuses numbers a masked sum would garble, while it is still known whose they are."""
    for key, value in tensors.items():
        bad = ~(value.double().abs() < most)  # also where it is NaN
        if bad.any():
            raise FederationError(
                f"{where}: {int(bad.sum())} of {value.numel()} numbers of {key!r} (as "
                f"{value[bad].flatten()[0].item():.4g}) are outside ±{most:.4g}, the range of the "
                "masked sum; set channel.clip, or lower the rate"
            )
    return tensors


def fixed(tensors: Tensors, clients: int, where: str) -> Tensors:
    """In whole numbers, small enough for the sum over so many clients."""
    floats = {key: value for key, value in tensors.items() if value.is_floating_point()}
    whole = {key: value for key, value in tensors.items() if key not in floats}
    guarded(floats, ROOM / FRACTION / clients, where)
    guarded(whole, ROOM / clients, where)
    steps = {key: (value * FRACTION).round() for key, value in floats.items()}
    return {key: value.to(torch.int64) for key, value in {**steps, **whole}.items()}


def mask(whole: Tensors, ids: Sequence[str], id: str, words: Sequence[str | int]) -> Tensors:
    """One client's whole numbers under the masks it shares, modulo 2^64; they look random.

    A rehearsal: masks are by the run's seed, and whoever knows it can take them off.
    """
    out = {}
    for key, value in whole.items():
        numbers = _unsigned(value)
        for a, b in _pairs(ids, id):
            draw = seeds.numbers("mask", *words, a, b, key)
            shared = draw.integers(0, 2**64, size=numbers.shape, dtype=np.uint64)
            numbers = numbers + shared if id == a else numbers - shared
        out[key] = torch.from_numpy(np.asarray(numbers).astype(np.int64))
    return out


def total(masked: Iterable[Tensors]) -> Tensors:
    """The sum of what the clients have masked, in whole numbers: the masks cancel."""
    sums: dict[str, NDArray[np.uint64]] = {}
    for one in masked:
        for key, value in one.items():
            sums[key] = sums[key] + _unsigned(value) if key in sums else _unsigned(value)
    return {key: torch.from_numpy(np.asarray(one).astype(np.int64)) for key, one in sums.items()}


def _unsigned(value: Tensor) -> NDArray[np.uint64]:
    return np.atleast_1d(value.numpy()).astype(np.uint64).reshape(value.shape)


def _pairs(ids: Sequence[str], id: str) -> list[tuple[str, str]]:
    """The pairs of a client on a circle of all, as in SecAgg+: no need for every pair."""
    ring = sorted(ids)
    place, count = ring.index(id), len(ring)
    near = {ring[(place + step) % count] for step in range(-NEIGHBOURS, NEIGHBOURS + 1)} - {id}
    return [(min(id, other), max(id, other)) for other in sorted(near)]


def combined(sums: Tensors, kind: str, like: Tensors) -> Tensors:
    """What the aggregate gets in place of all uploads: their mean, or for "total" their sum."""
    weight = float(sums[WEIGHT]) / FRACTION
    share = 1.0 if kind == "total" else weight
    return {
        key: (sums[key].double() / (FRACTION * share) if one.is_floating_point() else sums[key]).to(
            one.dtype
        )
        for key, one in like.items()
    }


def to_secagg(
    upload: Tensors, sent: Tensors, weight: float, channel: Channel, where: str
) -> Tensors:
    """What a site gives to SecAgg+: its weighted change, stretched to the range, and its weight."""
    if whole := [key for key, value in upload.items() if not value.is_floating_point()]:
        raise FederationError(
            f"{where}: {whole[0]!r} holds whole numbers, which SecAgg+ does not take; set "
            "channel.secure = false"
        )
    moved = change(upload, sent)
    factor = weight * _stretch(moved, channel)
    out = {key: factor * value.double() for key, value in moved.items()}
    return guarded({**out, WEIGHT: torch.tensor([weight], dtype=torch.float64)}, SECAGG, where)


def from_secagg(mean: Tensors, sent: Tensors, channel: Channel, where: str) -> Tensors:
    """The mean upload, from the mean over sites of what they gave to SecAgg+."""
    moved = {key: value for key, value in mean.items() if key != WEIGHT}
    factor = float(mean[WEIGHT]) * _stretch(moved, channel)
    moved = {key: (value / factor).float() for key, value in moved.items()}
    validate(moved, (), where)
    if (length := norm(moved)) > 2 * longest(channel, _count(moved)):
        raise FederationError(
            f"{where}: the sum says that the clients moved by {length:.4g} on average, more than "
            "the channel allows one; a masked upload was damaged or forged"
        )
    return apply(moved, sent, moved)


def _stretch(moved: Tensors, channel: Channel) -> float:
    most = longest(channel, _count(moved))
    return MARGIN * SECAGG / most if most < float("inf") else 1.0


def _count(moved: Tensors) -> int:
    return sum(value.numel() for value in moved.values())
