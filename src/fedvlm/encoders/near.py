"""Images that are nearly the same in two parts: saved again, scaled, or compressed once more.

Each image becomes a thumbnail of 16 x 16 colours, and two are near when these differ by little.
Crops, turned images and other colours are not found, and nothing is dropped: a person decides.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedvlm.data.federation import Division
from fedvlm.data.table import Dataset
from fedvlm.encoders.cache.decode import decode
from fedvlm.errors import DataError

SIDE = 16
# Root mean square difference of two thumbnails, of 255, by tools/near.py on training images of the
# demo: half of what the nearest two different ones (22.5) are apart. JPEG gives up to 14.
NEAR = 11.0
BLOCK = 2048  # rows compared at once


@dataclass(frozen=True)
class Near:
    """An image of a later part, and the nearest of those it is near to in an earlier one."""

    name: str
    part: str
    other: str
    other_part: str
    difference: float


def near_duplicates(
    dataset: Dataset, division: Division, progress: Callable[[int, int], None] | None = None
) -> list[Near]:
    """Images of validation and test that are nearly images of an earlier part, of any client."""
    parts = {
        part: np.concatenate([getattr(one, part) for one in division.members.values()])
        for part in ("train", "validation", "test")
    }
    rows = np.concatenate(list(parts.values()))
    small = np.zeros((len(dataset.source), SIDE * SIDE * 3), np.uint8)
    sound = np.zeros(len(dataset.source), bool)
    for done, row in enumerate(rows.tolist(), 1):
        try:
            small[row] = thumbnail(dataset.source.read(row))
            sound[row] = True
        except DataError:  # a run skips it, and names it then
            pass
        if progress:
            progress(done, len(rows))
    parts = {part: members[sound[members]] for part, members in parts.items()}
    found = []
    for later, earlier in (("validation", "train"), ("test", "train"), ("test", "validation")):
        for row, other, apart in _nearest(small, parts[later], parts[earlier]):
            names = dataset.source.name(row), dataset.source.name(other)
            found.append(Near(names[0], later, names[1], earlier, apart))
    return found


def thumbnail(data: bytes) -> NDArray[np.uint8]:
    image = decode(data).resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(image, np.uint8).reshape(-1)


def _nearest(
    small: NDArray[np.uint8], later: NDArray[np.int64], earlier: NDArray[np.int64]
) -> list[tuple[int, int, float]]:
    if not len(later) or not len(earlier):
        return []
    found = []
    for start in range(0, len(later), BLOCK):
        rows = later[start : start + BLOCK]
        mine = small[rows].astype(np.float32)
        best, where = np.full(len(rows), np.inf), np.zeros(len(rows), np.int64)
        for first in range(0, len(earlier), BLOCK):
            theirs = small[earlier[first : first + BLOCK]].astype(np.float32)
            # float32 rounds sums of 5e7 to a few units: 0.1 of the difference, NEAR is 11
            square = (mine**2).sum(1)[:, None] + (theirs**2).sum(1)[None] - 2 * mine @ theirs.T
            nearest = square.argmin(1)
            value = square[np.arange(len(rows)), nearest]
            better = value < best
            best[better], where[better] = value[better], earlier[first + nearest[better]]
        apart = np.sqrt(np.maximum(best, 0) / small.shape[1])
        near = np.flatnonzero(apart <= NEAR)
        found += [(int(rows[i]), int(where[i]), float(apart[i])) for i in near]
    return found
