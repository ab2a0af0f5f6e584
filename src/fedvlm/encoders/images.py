"""Decode and preprocess images: from encoded bytes to the array an encoder takes, also in worker processes.

Worker processes import this module, which does not import torch.
"""

import math
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from hashlib import sha256
from io import BytesIO
from multiprocessing import current_process, get_context, parent_process
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fedvlm.encoders import Preprocess
from fedvlm.errors import DataError

# Only these are tried: other formats of Pillow start interpreters or are rarely tested.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
PIXEL_LIMIT = 64_000_000  # above any camera we know; 17 kB of PNG can claim 144 megapixels
ASPECT_LIMIT = 200  # resizing the short side to 224 multiplies a sliver of one pixel by 224²


def decode(data: bytes) -> Image.Image:
    """Decode the first frame, upright, on white where it is transparent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what is refused or harmless here
        try:
            with open_checked(data) as image:
                image.load()
                return to_rgb(upright(image), image.format)
        except DataError:
            raise
        except Exception as error:  # Pillow raises nearly every kind on broken bytes
            kind = type(error).__name__
            raise DataError(f"the image is truncated or damaged ({kind}: {error}); replace or remove it") from error


def open_checked(data: bytes) -> Image.Image:
    """Read the header only, so that a small file that claims to be huge costs nothing."""
    if not data:
        raise DataError("the image has 0 bytes; replace or remove it")
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise DataError(f"the image is too large ({error}); scale it down first") from error
    except UnidentifiedImageError as error:
        formats = ", ".join(FORMATS)
        raise DataError(f"not an image that can be read: it begins with {data[:12]!r}, not as {formats}") from error
    width, height = image.size
    if width * height > PIXEL_LIMIT:
        raise DataError(f"the image has {width} x {height} pixels, more than {PIXEL_LIMIT:,}; scale it down first")
    if max(width, height) > ASPECT_LIMIT * min(width, height):
        raise DataError(f"the image has {width} x {height} pixels, a sliver above 1:{ASPECT_LIMIT}; crop it first")
    return image


def upright(image: Image.Image) -> Image.Image:
    """Rotate an image by its EXIF data; ignore damaged EXIF data."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def to_rgb(image: Image.Image, format: str | None) -> Image.Image:
    # Pillow gives 16-bit PNG and PPM as "I" too, but only TIFF has whole numbers of 32 bits
    if image.mode.startswith("I;16") or (image.mode == "I" and format != "TIFF"):
        return from_16_bits(image)
    if image.mode in ("I", "F"):
        kind = "whole" if image.mode == "I" else "floating-point"
        problem = f"the image holds {kind} numbers of 32 bits, whose black and white are unknown"
        raise DataError(f"{problem}; save it with 8 or 16 bits")
    if image.has_transparency_data:
        paint = image.convert("RGBA")
        white = Image.new("RGBA", paint.size, "white")
        return Image.alpha_composite(white, paint).convert("RGB")
    return image.convert("RGB")


def from_16_bits(image: Image.Image) -> Image.Image:
    """Scale by 257, so that 65535 is white; Pillow's own conversion clips everything above 255."""
    values = np.asarray(image).astype(np.uint32)
    gray = ((np.clip(values, 0, 65535) + 128) // 257).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        gray[values == clear] = 255
    return Image.fromarray(gray).convert("RGB")


CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Pixels:
    """Resize, crop, rescale, normalise; equal to the PIL processors of transformers to the bit, and torch-free."""

    size: tuple[int, int] | int | None  # (height, width), or the shorter edge, or no resizing
    crop: tuple[int, int] | None  # (height, width) out of the middle
    resample: int = Image.Resampling.BICUBIC
    rescale: float | None = 1 / 255
    mean: tuple[float, ...] | None = CLIP_MEAN
    std: tuple[float, ...] | None = CLIP_STD

    def __call__(self, image: Image.Image) -> NDArray[np.float32]:
        """(3, height, width) float32 of an RGB image."""
        return np.ascontiguousarray(self.normalise(self.resize_and_crop(image)).transpose(2, 0, 1))

    def resize_and_crop(self, image: Image.Image) -> NDArray[np.uint8]:
        """(height, width, 3): resize and crop to the size of the encoder."""
        pixels = self.resize(image)
        return pixels if self.crop is None else crop_centre(pixels, *self.crop)

    def resize(self, image: Image.Image) -> NDArray[np.uint8]:
        if self.size is not None:
            height, width = self._resized(image.height, image.width)
            image = image.resize((width, height), resample=Image.Resampling(self.resample))
        return np.asarray(image)

    def normalise(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(..., 3): rescale and normalise the colours."""
        values = pixels.astype(np.float32)
        if self.rescale is not None:
            values = (pixels.astype(np.float64) * self.rescale).astype(np.float32)
        if self.mean is not None and self.std is not None:
            mean, std = (np.array(channel_values, np.float32) for channel_values in (self.mean, self.std))
            values = (values - mean) / std
        return values

    def undo(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """(height, width, 3): turn preprocessed values back into an image to display."""
        pixels = values.transpose(1, 2, 0)
        if self.mean is not None and self.std is not None:
            pixels = pixels * np.array(self.std, np.float32) + np.array(self.mean, np.float32)
        if self.rescale is not None:
            pixels = pixels / self.rescale
        return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if isinstance(self.size, tuple):
            return self.size
        assert self.size is not None
        if width <= height:
            return int(self.size * height / width), self.size
        return self.size, int(self.size * width / height)

    def identity(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class TorchvisionPixels(Pixels):
    """The same by torchvision's rounding, which open_clip and timm use."""

    def resize_and_crop(self, image: Image.Image) -> NDArray[np.uint8]:
        pixels = self.resize(image)
        if self.crop is None:
            return pixels
        # to even numbers at half a pixel, where transformers rounds down
        top, left = (round((have - want) / 2) for have, want in zip(pixels.shape, self.crop, strict=False))
        return pixels[top : top + self.crop[0], left : left + self.crop[1]]

    def normalise(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        values = pixels.astype(np.float32) / np.float32(255)
        mean, std = (np.array(channel_values, np.float32) for channel_values in (self.mean, self.std))
        return (values - mean) / std


def crop_centre(pixels: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """Crop the centre of (rows, columns, channels); pad with black where the image is too small."""
    short = max(height - pixels.shape[0], 0), max(width - pixels.shape[1], 0)
    if any(short):
        before = [math.ceil(missing / 2) for missing in short]
        edges = [(b, missing - b) for b, missing in zip(before, short, strict=True)]
        pixels = np.pad(pixels, [*edges, (0, 0)])
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


class Prepared(NamedTuple):
    """A preprocessed image, or the reason why there is none."""

    digest: bytes
    image: NDArray[Any] | bytes | None
    reason: str = ""


class DecoderPool:
    """Processes that decode images ahead of the encoder."""

    def __init__(self, preprocess: Preprocess | None, workers: int, prefetch: int) -> None:
        self._preprocess, self._prefetch = preprocess, prefetch if workers else 0
        self._inline_images = prefetch // 2  # the first images are decoded in this process, while the workers start
        # not "fork": a process with the threads of an encoder cannot be forked safely
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imports once for all workers
        self._pool = workers and ProcessPoolExecutor(workers, context, initializer=_start, initargs=(preprocess,))

    def __enter__(self) -> "DecoderPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def stream(self, images: Iterable[tuple[bytes, bytes]]) -> Iterator[Prepared]:
        """Yield prepared images in the order of (digest, encoded bytes), decoding `prefetch` images ahead."""
        waiting: deque[tuple[bytes, bytes, Future[NDArray[Any] | str | None]]] = deque()
        for digest, data in images:
            waiting.append((digest, data, self._submit(digest, data)))
            if len(waiting) > self._prefetch:
                yield _finish(*waiting.popleft())
        while waiting:
            yield _finish(*waiting.popleft())

    def _submit(self, digest: bytes, data: bytes) -> "Future[NDArray[Any] | str | None]":
        if self._pool and not self._inline_images:
            try:
                return self._pool.submit(_work, digest, data)
            except BrokenProcessPool as error:
                raise _worker_died() from error
        self._inline_images = max(0, self._inline_images - 1)
        now: Future[NDArray[Any] | str | None] = Future()
        now.set_result(prepare(self._preprocess, digest, data))
        return now


def prepare(preprocess: Preprocess | None, digest: bytes, data: bytes) -> NDArray[Any] | str | None:
    """Return the array an encoder takes, None if it takes the bytes, or a message if the image is damaged."""
    if sha256(data).digest() != digest:
        return "the image changed while it was being read; run again"
    try:
        image = decode(data)
    except DataError as error:
        return str(error)
    if preprocess is None:
        return None
    try:
        return preprocess(image)
    except Exception as error:  # preprocessing is code of the encoder
        return f"the encoder cannot prepare it ({type(error).__name__}: {error})"


def _finish(digest: bytes, data: bytes, future: "Future[NDArray[Any] | str | None]") -> Prepared:
    try:
        result = future.result()
    except BrokenProcessPool as error:
        raise _worker_died() from error
    if isinstance(result, str):
        return Prepared(digest, None, result)
    return Prepared(digest, data if result is None else result)


def _worker_died() -> DataError:
    script = 'a script without `if __name__ == "__main__":`'
    return DataError(f"a decoding process died: too little memory, or {script}; repair that or use workers=0")


def check_main_guard() -> None:
    """Refuse to embed while a worker process imports the main script: it would wait for its own parent."""
    if getattr(current_process(), "_inheriting", False):
        remedy = 'put what it does under `if __name__ == "__main__":`'
        raise DataError(f"embedding starts processes which run this script again; {remedy}")


_worker_preprocess: Preprocess | None = None  # of this worker process, sent once


def _start(preprocess: Preprocess | None) -> None:
    global _worker_preprocess
    _worker_preprocess = preprocess
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and stops its workers
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the other cores belong to the encoder
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """Exit when the parent process dies; otherwise the worker would wait for ever."""
    parent = parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _work(digest: bytes, data: bytes) -> NDArray[Any] | str | None:
    return prepare(_worker_preprocess, digest, data)
