"""Encoded bytes to an RGB picture, refusing by name whatever is not a sound picture."""

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
            with open_checked(data) as picture:
                picture.load()
                return to_rgb(upright(picture), picture.format)
        except DataError:
            raise
        except Exception as error:  # Pillow's readers raise nearly every kind on broken bytes
            raise DataError(
                f"the picture is truncated or damaged ({type(error).__name__}: {error}); "
                "replace or remove it"
            ) from error


def open_checked(data: bytes) -> Image.Image:
    """Reads the header alone, so that a small file which claims to be huge costs nothing."""
    if not data:
        raise DataError("the picture has 0 bytes; replace or remove it")
    try:
        picture = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise DataError(f"the picture is too large ({error}); scale it down first") from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"not a picture that can be read: it begins with {data[:12]!r}; "
            f"the formats are {', '.join(FORMATS)}"
        ) from error
    width, height = picture.size
    if width * height > PIXEL_LIMIT:
        raise DataError(
            f"the picture has {width} x {height} pixels, more than {PIXEL_LIMIT:,}; "
            "scale it down first"
        )
    if max(width, height) > ASPECT_LIMIT * min(width, height):
        raise DataError(
            f"the picture has {width} x {height} pixels, a sliver longer than {ASPECT_LIMIT} "
            "times its width; crop it first"
        )
    return picture


def upright(picture: Image.Image) -> Image.Image:
    """Turned as its EXIF says; damaged EXIF says nothing, the pixels are still good."""
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:
        return picture


def to_rgb(picture: Image.Image, format: str | None) -> Image.Image:
    # Pillow gives 16-bit PNG and PPM as "I" too, but only TIFF has whole numbers of 32 bits
    if picture.mode.startswith("I;16") or (picture.mode == "I" and format != "TIFF"):
        return from_16_bits(picture)
    if picture.mode in ("I", "F"):
        raise DataError(
            f"the picture holds {'whole' if picture.mode == 'I' else 'floating-point'} numbers "
            "of 32 bits, whose black and white are unknown; save it with 8 or 16 bits"
        )
    if picture.has_transparency_data:
        paint = picture.convert("RGBA")
        white = Image.new("RGBA", paint.size, "white")
        return Image.alpha_composite(white, paint).convert("RGB")
    return picture.convert("RGB")


def from_16_bits(picture: Image.Image) -> Image.Image:
    """Scaled by 257, as 65535 is white; Pillow's own conversion cuts everything above 255 off."""
    values = np.asarray(picture).astype(np.uint32)
    gray = ((np.clip(values, 0, 65535) + 128) // 257).astype(np.uint8)
    clear = picture.info.get("transparency")
    if isinstance(clear, int):
        gray[values == clear] = 255
    return Image.fromarray(gray).convert("RGB")
