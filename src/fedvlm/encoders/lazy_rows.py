"""Rows that are read or decoded when they are indexed: patch embeddings on disk, and images for a trained tower."""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.data.table import Source
from fedvlm.encoders.cache.rows import check_sums
from fedvlm.encoders.images import Pixels, prepare
from fedvlm.errors import DataError, EncoderError
from fedvlm.storage.large_tensors import MAX_IN_MEMORY_BYTES

MAX_DECODED_BYTES = 512 << 20  # of images kept in memory; others are decoded every time


def _select(rows: NDArray[np.int64], index: Any) -> NDArray[np.int64]:
    selected: NDArray[np.int64] = rows[index.numpy() if isinstance(index, Tensor) else index]
    return selected.reshape(-1)


class MappedRows:
    """(rows, ...) of a memory-mapped file: `rows[index]` is a tensor in memory, `rows.take(index)` is not.

    A row is checked when a process first reads it.
    """

    def __init__(
        self,
        array: "np.memmap[Any, Any]",
        rows: NDArray[np.int64],
        sums: NDArray[np.uint32],
        verified: NDArray[np.bool_],
        location: str,
    ) -> None:
        self._array, self._rows = array, rows
        self._sums, self._verified, self._location = sums, verified, location  # of all rows of the array

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._rows), *self._array.shape[1:]))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Tensor:
        rows = self.take(index)._rows
        values = np.asarray(self._array)[rows]
        new = ~self._verified[rows]
        check_sums(values[new], self._sums[rows[new]], self._location)
        self._verified[rows] = True
        # Release the pages, so that they do not count as memory of this process.
        self._array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        return torch.from_numpy(values)

    def take(self, index: Any) -> "MappedRows":
        """Select rows without reading them."""
        return MappedRows(self._array, _select(self._rows, index), self._sums, self._verified, self._location)


def check_and_map(array: NDArray[Any], sums: NDArray[np.uint32], location: str) -> Tensor | MappedRows:
    """Return a checked tensor over the array, or lazy rows for a large memory map."""
    if isinstance(array, np.memmap) and array.nbytes > MAX_IN_MEMORY_BYTES and hasattr(mmap, "MADV_DONTNEED"):
        return MappedRows(array, np.arange(len(array)), sums, np.zeros(len(array), bool), location)
    check_sums(array, sums, location)
    return torch.from_numpy(array)


class ImageStream:
    """(samples, 3, height, width) pixels that are decoded when indexed; `take` selects without decoding."""

    def __init__(self, image_cache: "DecodedImageCache", rows: NDArray[np.int64]) -> None:
        self._image_cache, self._rows = image_cache, rows

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._rows), 3, *self._image_cache.size))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Tensor:
        return self._image_cache.pixels(_select(self._rows, index))

    def take(self, index: Any) -> "ImageStream":
        """Select images without decoding them."""
        return ImageStream(self._image_cache, _select(self._rows, index))


def stream_images(
    source: Source, rows: NDArray[np.int64], content: Sequence[str], preprocess: Any, budget: int = MAX_DECODED_BYTES
) -> ImageStream:
    """Stream images of a source by row number; `content` are the hex digests they had when encoded."""
    image_cache = DecodedImageCache(source, rows, content, preprocess, budget)
    return ImageStream(image_cache, np.arange(len(rows)))


class DecodedImageCache:
    """Cropped images with one byte per colour, a quarter of the memory of preprocessed floats.

    Forked processes share the memory. Each trusts only images it stored itself or found when it was forked, because
    another process may be writing.
    """

    def __init__(
        self, source: Source, rows: NDArray[np.int64], content: Sequence[str], preprocess: Any, budget: int
    ) -> None:
        if not isinstance(preprocess, Pixels):
            raise EncoderError("the image tower takes pixels, but the encoder has no preprocessing to pixels")
        side = preprocess.crop or preprocess.size
        if not isinstance(side, tuple):
            raise EncoderError("images are not cropped to one size; set crop_size in preprocessor_config.json")
        self.size = side
        self._source, self._rows, self._preprocess = source, rows, preprocess
        self._content = [bytes.fromhex(digest) for digest in content]
        places: dict[bytes, int] = {}  # equal images share a place
        self._place = [places.setdefault(digest, len(places)) for digest in self._content]
        image_bytes = 3 * side[0] * side[1]
        count = min(len(places), budget // image_bytes)
        self._decoded = np.zeros((0, *side, 3), np.uint8)
        if count:
            self._decoded = np.frombuffer(mmap.mmap(-1, count * image_bytes), np.uint8).reshape(count, *side, 3)
        self._is_decoded = np.zeros(count, bool)
        # the normalised value of each of the 256 values of a colour
        self._table = preprocess.normalise(np.arange(256, dtype=np.uint8)[:, None].repeat(3, 1)).T

    def pixels(self, numbers: NDArray[np.int64]) -> Tensor:
        out = np.empty((len(numbers), 3, *self.size), np.float32)
        for pixels, number in zip(out, numbers.tolist(), strict=True):
            cut = self._cut(number)
            for colour in range(3):
                np.take(self._table[colour], cut[..., colour], out=pixels[colour])
        return torch.from_numpy(out)

    def _cut(self, number: int) -> NDArray[np.uint8]:
        place = self._place[number]
        if place < len(self._decoded) and self._is_decoded[place]:
            cut: NDArray[np.uint8] = self._decoded[place]
            return cut
        row = int(self._rows[number])
        made = prepare(self._preprocess.resize_and_crop, self._content[number], self._source.read(row))
        if not isinstance(made, np.ndarray):
            raise DataError(f"{self._source.name(row)}: {made}")
        if place < len(self._decoded):
            self._decoded[place] = made
            self._is_decoded[place] = True
        return made
