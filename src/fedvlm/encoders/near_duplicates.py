"""Find near-duplicates between splits: images that were saved again, scaled or compressed once more.

Each image becomes a thumbnail of 16 x 16 colours; two images are near-duplicates if these differ by little. Crops,
rotations and other colours are not found, and nothing is dropped: the user decides.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedvlm.data.partition import Partition
from fedvlm.data.splits import Ints
from fedvlm.data.table import Dataset
from fedvlm.encoders.images import decode
from fedvlm.errors import DataError

THUMBNAIL_SIDE = 16
# Root mean square difference of two thumbnails, of 255, measured on training images of the
# demo: half of what the nearest two different ones (22.5) are apart. JPEG gives up to 14.
MAX_DUPLICATE_RMS = 11.0
IMAGES_PER_BLOCK = 2048  # compared at once


@dataclass(frozen=True)
class NearDuplicate:
    """An image of a later split, and its nearest near-duplicate in an earlier split."""

    name: str
    split: str
    duplicate_of: str
    duplicate_split: str
    difference: float


def near_duplicates(
    dataset: Dataset, partition: Partition, progress: Callable[[int, int], None] | None = None
) -> list[NearDuplicate]:
    """Find images of validation and test that are near-duplicates of an earlier split, of any client."""
    clients, splits = partition.clients.values(), ("train", "validation", "test")
    parts = {part: np.concatenate([getattr(client, part) for client in clients]) for part in splits}
    rows = np.concatenate(list(parts.values()))
    thumbnails = np.zeros((len(dataset.source), THUMBNAIL_SIDE * THUMBNAIL_SIDE * 3), np.uint8)
    is_readable = np.zeros(len(dataset.source), bool)
    for done, row in enumerate(rows.tolist(), 1):
        try:
            thumbnails[row] = thumbnail(dataset.source.read(row))
            is_readable[row] = True
        except DataError:  # a run skips it and reports it
            pass
        if progress:
            progress(done, len(rows))
    parts = {part: members[is_readable[members]] for part, members in parts.items()}
    duplicates = []
    for later, earlier in (("validation", "train"), ("test", "train"), ("test", "validation")):
        for row, other_row, distance in _nearest(thumbnails, parts[later], parts[earlier]):
            names = dataset.source.name(row), dataset.source.name(other_row)
            duplicates.append(NearDuplicate(names[0], later, names[1], earlier, distance))
    return duplicates


def thumbnail(data: bytes) -> NDArray[np.uint8]:
    image = decode(data).resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BOX)
    return np.asarray(image, np.uint8).reshape(-1)


def _nearest(thumbnails: NDArray[np.uint8], later: Ints, earlier: Ints) -> list[tuple[int, int, float]]:
    if not len(later) or not len(earlier):
        return []
    pairs = []
    for start in range(0, len(later), IMAGES_PER_BLOCK):
        rows = later[start : start + IMAGES_PER_BLOCK]
        later_pixels = thumbnails[rows].astype(np.float32)
        best, best_rows = np.full(len(rows), np.inf), np.zeros(len(rows), np.int64)
        for first in range(0, len(earlier), IMAGES_PER_BLOCK):
            earlier_pixels = thumbnails[earlier[first : first + IMAGES_PER_BLOCK]].astype(np.float32)
            # float32 rounds sums of 5e7 to a few units: 0.1 of the difference, MAX_DUPLICATE_RMS is 11
            norms = (later_pixels**2).sum(1)[:, None] + (earlier_pixels**2).sum(1)[None]
            square = norms - 2 * later_pixels @ earlier_pixels.T
            nearest = square.argmin(1)
            value = square[np.arange(len(rows)), nearest]
            better = value < best
            best[better], best_rows[better] = value[better], earlier[first + nearest[better]]
        distances = np.sqrt(np.maximum(best, 0) / thumbnails.shape[1])
        within_limit = np.flatnonzero(distances <= MAX_DUPLICATE_RMS)
        pairs += [(int(rows[i]), int(best_rows[i]), float(distances[i])) for i in within_limit]
    return pairs
