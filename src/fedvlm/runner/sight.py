"""Rows that a machine of a cluster reads for itself, where it sees the files they are from."""

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from fedvlm.data.table import Embedded
from fedvlm.encoders.cache.embed import Precision, read_again
from fedvlm.encoders.cache.folder import directory
from fedvlm.encoders.store import open_store
from fedvlm.errors import FedVLMError
from fedvlm.runner.settings import Settings

STORE = "store:"
KEPT = 2  # tables of rows that a worker keeps open


@dataclass(frozen=True)
class Place:
    """Where the rows of a run lie, and what they are."""

    path: Path  # a store, or the cache of embeddings
    encoder: str  # the fingerprint's beginning, of rows in a cache; else empty
    precision: Precision
    patches: bool
    digest: str


_open: dict[str, Embedded] = {}


def apart(settings: Settings, rows: Embedded) -> tuple[Embedded, Place]:
    """The rows without what lies in a file, and where that is."""
    of_store = settings.encoder.startswith(STORE)
    place = Place(
        Path(settings.encoder.removeprefix(STORE)).expanduser().absolute()
        if of_store
        else directory().absolute(),
        "" if of_store else rows.encoder.rpartition("@")[2],
        settings.precision,
        rows.patches is not None,
        digest(rows.x),
    )
    return replace(rows, x=rows.x[:0], patches=None), place


def sees(place: Place) -> bool:
    """Whether there is a file or folder of that name on this machine."""
    return place.path.exists()


def whole(bare: Embedded, place: Place) -> Embedded | None:
    """The rows with what lies there; None if it is not there, or not the same."""
    if place.digest not in _open:
        try:
            x, patches = _read(bare, place)
        except (FedVLMError, OSError, KeyError):
            return None
        if digest(x) != place.digest:
            return None
        for old in list(_open)[: 1 - KEPT]:
            del _open[old]
        _open[place.digest] = replace(bare, x=x, patches=patches)
    held = _open[place.digest]
    return replace(bare, x=held.x, patches=held.patches)


def _read(bare: Embedded, place: Place) -> tuple[Tensor, Any]:
    if place.encoder:
        content = [bytes.fromhex(one) for one in bare.content]
        return read_again(place.path, place.encoder, place.precision, place.patches, content)
    stored = open_store(place.path)
    number = {one: row for row, one in enumerate(stored.content)}
    rows = [number[one] for one in bare.content]
    x = stored.x if rows == list(range(len(stored.x))) else stored.x[rows]
    return x, None if stored.patches is None or not place.patches else stored.patches[rows]


def digest(x: Tensor) -> str:
    return sha256(x.contiguous().numpy().data).hexdigest()
