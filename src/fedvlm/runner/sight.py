"""Rows that a machine of a cluster reads for itself, where it sees the files they are from."""

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from fedvlm.data.table import EmbeddedTable
from fedvlm.encoders.cache import cache_directory
from fedvlm.encoders.cache.embed import Precision, read_cached
from fedvlm.encoders.store import open_store
from fedvlm.errors import FedVLMError
from fedvlm.runner.settings import Settings

STORE_PREFIX = "store:"
MAX_OPEN_TABLES = 2  # tables of rows that a worker keeps open


@dataclass(frozen=True)
class SampleLocation:
    """Where the rows of a run lie, and what they are."""

    path: Path  # a store, or the cache of embeddings
    encoder: str  # the fingerprint's beginning, of rows in a cache; else empty
    precision: Precision
    patches: bool
    digest: str


_open_tables: dict[str, EmbeddedTable] = {}


def strip_samples(settings: Settings, rows: EmbeddedTable) -> tuple[EmbeddedTable, SampleLocation]:
    """The rows without what lies in a file, and where that is."""
    of_store = settings.encoder.startswith(STORE_PREFIX)
    place = SampleLocation(
        Path(settings.encoder.removeprefix(STORE_PREFIX)).expanduser().absolute()
        if of_store
        else cache_directory().absolute(),
        "" if of_store else rows.encoder.rpartition("@")[2],
        settings.precision,
        rows.patches is not None,
        digest(rows.x),
    )
    return replace(rows, x=rows.x[:0], patches=None), place


def path_exists(place: SampleLocation) -> bool:
    """Whether there is a file or folder of that name on this machine."""
    return place.path.exists()


def load_samples(bare: EmbeddedTable, place: SampleLocation) -> EmbeddedTable | None:
    """The rows with what lies there; None if it is not there, or not the same."""
    if place.digest not in _open_tables:
        try:
            x, patches = _read(bare, place)
        except (FedVLMError, OSError, KeyError):
            return None
        if digest(x) != place.digest:
            return None
        for old in list(_open_tables)[: 1 - MAX_OPEN_TABLES]:
            del _open_tables[old]
        _open_tables[place.digest] = replace(bare, x=x, patches=patches)
    held = _open_tables[place.digest]
    return replace(bare, x=held.x, patches=held.patches)


def _read(bare: EmbeddedTable, place: SampleLocation) -> tuple[Tensor, Any]:
    if place.encoder:
        content = [bytes.fromhex(content_digest) for content_digest in bare.content]
        return read_cached(place.path, place.encoder, place.precision, place.patches, content)
    stored = open_store(place.path)
    number = {content_digest: row for row, content_digest in enumerate(stored.content)}
    rows = [number[content_digest] for content_digest in bare.content]
    x = stored.x if rows == list(range(len(stored.x))) else stored.x[rows]
    return x, None if stored.patches is None or not place.patches else stored.patches[rows]


def digest(x: Tensor) -> str:
    return sha256(x.contiguous().numpy().data).hexdigest()
