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

from fedvlm import seeds
from fedvlm.core import Tensors
from fedvlm.errors import FederationError

FRACTION = 2.0**32  # steps of fixed point in 1
ROOM = 2.0**30  # a sum stays below it; the rest is for the sign and a margin
NEIGHBOURS = 8  # clients on either side with which a client shares masks
WEIGHT = "channel/weight"  # counts travel inside the sum, not beside it
SECAGG = 8.0  # SecAgg+ cuts larger numbers off, silently


def weighted(upload: Tensors, weight: float, where: str) -> Tensors:
    """weight · upload and the weight itself, in float64."""
    for key, value in upload.items():
        if not value.is_floating_point():
            raise FederationError(
                f"{where}: {key!r} holds {value.dtype}, and a masked sum takes floating-point "
                "numbers; set channel.secure = false"
            )
    out = {key: weight * value.double() for key, value in upload.items()}
    return {**out, WEIGHT: torch.tensor(weight, dtype=torch.float64)}


def guarded(tensors: Tensors, most: float, where: str) -> Tensors:
    """Refuses numbers a masked sum would garble, while it is still known whose they are."""
    for key, value in tensors.items():
        bad = ~(value.abs() < most)  # also where it is NaN
        if bad.any():
            raise FederationError(
                f"{where}: {int(bad.sum())} of {value.numel()} numbers of {key!r} (as "
                f"{value[bad].flatten()[0].item():.4g}) are outside ±{most:.4g}, the range of the "
                "masked sum; set channel.clip, or lower the rate"
            )
    return tensors


def mask(tensors: Tensors, ids: Sequence[str], id: str, words: Sequence[str | int]) -> Tensors:
    """One client's fixed-point numbers under the masks it shares; they look random."""
    out = {}
    for key, value in tensors.items():
        fixed = (value * FRACTION).round().to(torch.int64).numpy().astype(np.uint64)
        for a, b in _pairs(ids, id):
            draw = seeds.numbers("mask", *words, a, b, key)
            shared = draw.integers(0, 2**64, size=fixed.shape, dtype=np.uint64)
            fixed = fixed + shared if id == a else fixed - shared
        out[key] = torch.from_numpy(np.asarray(fixed).astype(np.int64))
    return out


def total(masked: Iterable[Tensors]) -> Tensors:
    """The sum of what the clients have masked: the masks cancel."""
    sums: dict[str, NDArray[np.uint64]] = {}
    for one in masked:
        for key, value in one.items():
            fixed = value.numpy().astype(np.uint64)
            sums[key] = sums[key] + fixed if key in sums else fixed
    return {
        key: torch.from_numpy(np.asarray(value).astype(np.int64)).double() / FRACTION
        for key, value in sums.items()
    }


def _pairs(ids: Sequence[str], id: str) -> list[tuple[str, str]]:
    """The pairs of a client on a circle of all, as in SecAgg+: no need for every pair."""
    ring = sorted(ids)
    place, count = ring.index(id), len(ring)
    near = {ring[(place + step) % count] for step in range(-NEIGHBOURS, NEIGHBOURS + 1)} - {id}
    return [(min(id, other), max(id, other)) for other in sorted(near)]


def combined(sums: Tensors, kind: str, like: Tensors) -> Tensors:
    """What the aggregate gets in place of all uploads: their mean, or for "total" their sum."""
    whole = dict(sums)
    weight = whole.pop(WEIGHT)
    share = 1.0 if kind == "total" else weight
    return {key: (value / share).to(like[key].dtype) for key, value in whole.items()}
