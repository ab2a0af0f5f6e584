"""Images as rows that are decoded when they are asked for, for methods that train the tower."""

from collections.abc import Sequence
from mmap import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.data.table import Source
from fedvlm.encoders.cache.workers import prepare
from fedvlm.encoders.preprocess import Pixels
from fedvlm.errors import DataError, EncoderError

MAX_DECODED_BYTES = 512 << 20  # bytes of decoded images that are kept; others are decoded every time


class ImageStream:
    """(rows, 3, height, width) pixels: `stream[index]` is a float32 tensor, `take` is not."""

    def __init__(self, image_cache: "DecodedImageCache", rows: NDArray[np.int64]) -> None:
        self._image_cache, self._rows = image_cache, rows

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._rows), 3, *self._image_cache.size))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Tensor:
        return self._image_cache.pixels(self._rows[_numbers(index)].reshape(-1))

    def take(self, index: Any) -> "ImageStream":
        """Some of the rows, still undecoded."""
        return ImageStream(self._image_cache, self._rows[_numbers(index)].reshape(-1))


def _numbers(index: Any) -> Any:
    return index.numpy() if isinstance(index, Tensor) else index


def stream_images(
    source: Source,
    rows: NDArray[np.int64],
    content: Sequence[str],
    preprocess: Any,
    budget: int = MAX_DECODED_BYTES,
) -> ImageStream:
    """Rows of a source by number, with the hex digests of the images they held when encoded."""
    image_cache = DecodedImageCache(source, rows, content, preprocess, budget)
    return ImageStream(image_cache, np.arange(len(rows)))


class DecodedImageCache:
    """Cut images, one byte per colour, so that four times as many fit as of an encoder's numbers.

    The memory is shared with processes that are forked from this one. Each of them trusts only
    what it has put there itself, or found there when it began, because another may be writing.
    """

    def __init__(
        self,
        source: Source,
        rows: NDArray[np.int64],
        content: Sequence[str],
        preprocess: Any,
        budget: int,
    ) -> None:
        if not isinstance(preprocess, Pixels):
            raise EncoderError("the image tower takes pixels, but the encoder makes none of them")
        side = preprocess.crop or preprocess.size
        if not isinstance(side, tuple):
            raise EncoderError(
                "the encoder leaves images as wide as they are; to train its image tower give "
                "crop_size in its preprocessor_config.json"
            )
        self.size = side
        self._source, self._rows, self._preprocess = source, rows, preprocess
        self._content = [bytes.fromhex(digest) for digest in content]
        places: dict[bytes, int] = {}  # the same image has one place
        self._place = [places.setdefault(digest, len(places)) for digest in self._content]
        image_bytes = 3 * side[0] * side[1]
        count = min(len(places), budget // image_bytes)
        self._decoded = np.zeros((0, *side, 3), np.uint8)
        if count:
            self._decoded = np.frombuffer(mmap(-1, count * image_bytes), np.uint8).reshape(count, *side, 3)
        self._is_decoded = np.zeros(count, bool)
        # what the encoder makes of each of the 256 values of a colour
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
