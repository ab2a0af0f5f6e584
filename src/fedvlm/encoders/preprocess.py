"""Image to array, the way the model's authors did it, without their image library."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Pixels:
    """Resize, crop, rescale, normalise: equal to the PIL processors of transformers, bit by bit."""

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
        """(height, width, 3) of the size the encoder takes, in the colours of the image."""
        if self.size is not None:
            height, width = self._resized(image.height, image.width)
            image = image.resize((width, height), resample=Image.Resampling(self.resample))
        pixels = np.asarray(image)
        return pixels if self.crop is None else crop_centre(pixels, *self.crop)

    def normalise(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(..., 3) colours as the encoder's numbers, each colour by itself."""
        values = pixels.astype(np.float32)
        if self.rescale is not None:
            values = (pixels.astype(np.float64) * self.rescale).astype(np.float32)
        if self.mean is not None and self.std is not None:
            mean, std = (np.array(channel_values, np.float32) for channel_values in (self.mean, self.std))
            values = (values - mean) / std
        return values

    def undo(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """(height, width, 3): the image as the encoder sees it, for a person to look at."""
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


def crop_centre(pixels: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """The middle of (rows, columns, channels); black where the image is too small."""
    short = max(height - pixels.shape[0], 0), max(width - pixels.shape[1], 0)
    if any(short):
        before = [math.ceil(missing / 2) for missing in short]
        edges = [(b, missing - b) for b, missing in zip(before, short, strict=True)]
        pixels = np.pad(pixels, [*edges, (0, 0)])
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]
