"""Every kind of image becomes RGB; every kind of non-image is refused by name."""

import struct
import zlib
from contextlib import suppress
from io import BytesIO
from time import process_time
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedvlm.encoders.images import ASPECT_LIMIT, FORMATS, PIXEL_LIMIT, decode
from fedvlm.errors import DataError


def encoded(image: Image.Image, format: str = "PNG", **how: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format, **how)
    return buffer.getvalue()


def noise(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def huge_png(width: int, height: int) -> bytes:
    """A valid black PNG of any size in a few kilobytes, made without its pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + body))
        return struct.pack(">I", len(body)) + name + body + crc

    squeeze, row = zlib.compressobj(9), bytes(1 + (width + 7) // 8)
    body = b"".join(squeeze.compress(row) for _ in range(height)) + squeeze.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("format", FORMATS)
def test_every_listed_format_is_read_as_rgb(format: str) -> None:
    lossless = {"WEBP": {"lossless": True}}.get(format, {})
    image = decode(encoded(noise(), format, **lossless))
    assert image.mode == "RGB"
    assert image.size == (40, 30)
    if format not in ("JPEG", "GIF"):
        assert np.array_equal(np.asarray(image), np.asarray(noise()))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "RGB"])
def test_every_png_mode_is_read_as_rgb(mode: str) -> None:
    image = decode(encoded(noise(mode)))
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), np.asarray(noise(mode).convert("RGB")))


def test_one_bit_white_is_white() -> None:
    assert decode(encoded(Image.new("1", (4, 4), 1))).getpixel((0, 0)) == (255, 255, 255)


def test_cmyk_jpeg_keeps_its_colours() -> None:
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    r, g, b = decode(encoded(red, "JPEG", quality=95)).getpixel((8, 8))
    assert r > 240
    assert max(g, b) < 15


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_and_not_clipped(format: str) -> None:
    ramp = np.array([[0, 255, 257, 32768, 65535]], dtype=np.uint16)
    image = decode(encoded(Image.fromarray(ramp), format))
    assert [image.getpixel((i, 0))[0] for i in range(5)] == [0, 1, 1, 128, 255]


def test_sixteen_bit_ppm_is_scaled() -> None:
    image = decode(b"P5 2 1 65535\n" + struct.pack(">HH", 65535, 32768))
    assert [image.getpixel((i, 0))[0] for i in range(2)] == [255, 128]


def test_clear_value_of_sixteen_bits_is_white() -> None:
    values = Image.fromarray(np.array([[1000, 2000]], dtype=np.uint16))
    image = decode(encoded(values, transparency=1000))
    assert image.getpixel((0, 0)) == (255, 255, 255)
    assert image.getpixel((1, 0)) == (8, 8, 8)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_of_32_bits_are_refused(mode: str) -> None:
    with pytest.raises(DataError, match="8 or 16 bits"):
        decode(encoded(Image.new(mode, (4, 4)), "TIFF"))


def test_alpha_is_laid_on_white() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    transparent = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert decode(encoded(clear)).getpixel((0, 0)) == (255, 255, 255)
    assert decode(encoded(transparent)).getpixel((0, 0)) == (127, 127, 127)


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_transparent_palette_is_laid_on_white(format: str) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.putpixel((0, 0), 0)
    read = decode(encoded(image, format, transparency=1))
    assert read.getpixel((0, 0)) == (10, 20, 30)
    assert read.getpixel((3, 3)) == (255, 255, 255)


def test_palette_with_partial_alpha_is_laid_on_white() -> None:
    image = Image.new("P", (2, 1), 0)
    image.putpalette([0, 0, 0, 200, 0, 0])
    image.putpixel((1, 0), 1)
    read = decode(encoded(image, transparency=bytes([128, 255])))
    assert read.getpixel((0, 0)) == (127, 127, 127)
    assert read.getpixel((1, 0)) == (200, 0, 0)


def test_exif_rotation_is_undone() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    image = decode(encoded(noise(), exif=exif))
    assert image.size == (30, 40)
    assert np.array_equal(np.asarray(image), np.rot90(np.asarray(noise()), -1))


def test_damaged_exif_does_not_cost_the_picture() -> None:
    image = encoded(noise(), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xffrubbish")
    assert decode(image).size == (40, 30)


def test_first_frame_of_an_animation_is_read() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("format", [*FORMATS])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_truncated_pictures_are_refused(format: str, fraction: float) -> None:
    data = encoded(noise(), format)
    with pytest.raises(DataError, match=r"remove it|begins with"):
        decode(data[: int(fraction * len(data))])


def test_zero_bytes_are_refused() -> None:
    with pytest.raises(DataError, match="0 bytes"):
        decode(b"")


@pytest.mark.parametrize(
    "data",
    [
        b"these are words in a file named cat.jpg",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7\n",
        b"\x00" * 100,
        encoded(noise(), "EPS"),
        encoded(noise(), "ICO"),
        encoded(noise(), "TGA"),
        encoded(noise(), "JPEG2000"),
    ],
)
def test_text_and_unlisted_formats_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="JPEG, PNG, WEBP"):
        decode(data)


@pytest.mark.parametrize("side", [12_000, 20_000])  # below and above Pillow's own limit
def test_bomb_is_refused_from_its_header(side: int) -> None:
    data = huge_png(side, side)
    assert len(data) < 60_000
    start = process_time()
    with pytest.raises(DataError, match="scale it down"):
        decode(data)
    assert process_time() - start < 0.1  # its pixels take far longer


def test_bomb_of_any_format_is_refused() -> None:
    side = int(PIXEL_LIMIT**0.5) + 1
    with pytest.raises(DataError, match="scale it down"):
        decode(b"P4 %d %d\n" % (side, side))


def test_large_picture_below_the_limit_is_read() -> None:
    assert decode(huge_png(7000, 7000)).size == (7000, 7000)


def test_sliver_is_refused() -> None:
    with pytest.raises(DataError, match="sliver"):
        decode(encoded(Image.new("L", (ASPECT_LIMIT + 1, 1))))
    assert decode(encoded(Image.new("L", (ASPECT_LIMIT, 1)))).size == (ASPECT_LIMIT, 1)


@pytest.mark.parametrize("format", FORMATS)
def test_flipped_bytes_give_a_picture_or_a_data_error(format: str) -> None:
    data, rng = encoded(noise(), format), np.random.default_rng(1)
    for _ in range(60):
        broken = bytearray(data)
        for place in rng.integers(0, len(data), 4):
            broken[place] = rng.integers(0, 256)
        with suppress(DataError):
            assert decode(bytes(broken)).mode == "RGB"
