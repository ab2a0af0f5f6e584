"""Encoded bytes to an RGB image, refusing by name whatever is not a sound image."""

import warnings
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedvlm.errors import DataError

# Only these are ever tried: other Pillow formats start interpreters or are rarely tested.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
PIXEL_LIMIT = 64_000_000  # above any camera we know; 17 kB of PNG can claim 144 megapixels
ASPECT_LIMIT = 200  # resizing the short side to 224 multiplies a sliver of one pixel by 224²


def decode(data: bytes) -> Image.Image:
    """The first frame, upright, on white where it is transparent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about what is refused or harmless here
        try:
            with open_checked(data) as image:
                image.load()
                return to_rgb(upright(image), image.format)
        except DataError:
            raise
        except Exception as error:  # Pillow's readers raise nearly every kind on broken bytes
            raise DataError(
                f"the image is truncated or damaged ({type(error).__name__}: {error}); replace or remove it"
            ) from error


def open_checked(data: bytes) -> Image.Image:
    """Reads the header alone, so that a small file which claims to be huge costs nothing."""
    if not data:
        raise DataError("the image has 0 bytes; replace or remove it")
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise DataError(f"the image is too large ({error}); scale it down first") from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"not an image that can be read: it begins with {data[:12]!r}; the formats are {', '.join(FORMATS)}"
        ) from error
    width, height = image.size
    if width * height > PIXEL_LIMIT:
        raise DataError(f"the image has {width} x {height} pixels, more than {PIXEL_LIMIT:,}; scale it down first")
    if max(width, height) > ASPECT_LIMIT * min(width, height):
        raise DataError(
            f"the image has {width} x {height} pixels, a sliver longer than {ASPECT_LIMIT} "
            "times its width; crop it first"
        )
    return image


def upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF says; damaged EXIF says nothing, the pixels are still good."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def to_rgb(image: Image.Image, format: str | None) -> Image.Image:
    # Pillow gives 16-bit PNG and PPM as "I" too, but only TIFF has whole numbers of 32 bits
    if image.mode.startswith("I;16") or (image.mode == "I" and format != "TIFF"):
        return from_16_bits(image)
    if image.mode in ("I", "F"):
        raise DataError(
            f"the image holds {'whole' if image.mode == 'I' else 'floating-point'} numbers "
            "of 32 bits, whose black and white are unknown; save it with 8 or 16 bits"
        )
    if image.has_transparency_data:
        paint = image.convert("RGBA")
        white = Image.new("RGBA", paint.size, "white")
        return Image.alpha_composite(white, paint).convert("RGB")
    return image.convert("RGB")


def from_16_bits(image: Image.Image) -> Image.Image:
    """Scaled by 257, as 65535 is white; Pillow's own conversion cuts everything above 255 off."""
    values = np.asarray(image).astype(np.uint32)
    gray = ((np.clip(values, 0, 65535) + 128) // 257).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        gray[values == clear] = 255
    return Image.fromarray(gray).convert("RGB")
