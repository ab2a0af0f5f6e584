"""Images of more than 8 bits, DICOM among them, given out as plain PNG.

What leaves here are pixels: no tag of a DICOM file reaches a digest, a record, an encoder or an
address it is sent to.
"""

import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedvlm.data.png import encode_png, scale_to_grey
from fedvlm.data.table import Source
from fedvlm.errors import DataError, SettingsError

Window = tuple[float, float]  # what is black and what is white, in the image's own numbers
MAX_FRAME_PIXELS = 64_000_000  # pixels of a frame; a header may claim any number
SUFFIXES_16_BIT = (".png", ".tif", ".tiff", ".pgm")  # files that may hold 16 bits


class EightBitSource:
    """Another source, with DICOM and 16-bit images as 8-bit PNG; the others are as they are."""

    def __init__(self, source: Source, window: Window | None = None) -> None:
        self.source, self.window = source, window

    def __len__(self) -> int:
        return len(self.source)

    def name(self, row: int) -> str:
        return self.source.name(row)

    def read(self, row: int) -> bytes:
        return to_eight_bit(self.source.name(row), self.source.read(row), self.window)


def check_window(value: Any) -> Window | None:
    """`source.window = [low, high]`, checked."""
    if value is None:
        return None
    is_numeric = isinstance(value, Sequence) and all(isinstance(bound, int | float) for bound in value)
    if not is_numeric or len(value) != 2 or not value[0] < value[1]:
        raise SettingsError(
            f"source.window = {value!r} does not fit; it takes what is black and what is white, as [-160, 240]"
        )
    return float(value[0]), float(value[1])


def to_eight_bit(name: str, data: bytes, window: Window | None) -> bytes:
    """An image's bytes, of which only those of more than 8 bits are changed."""
    if data[128:132] == b"DICM":
        return encode_png(read_dicom(name, data, window))
    if not name.lower().endswith(SUFFIXES_16_BIT) or not _may_be_16_bit(data):
        return data
    try:
        with warnings.catch_warnings(), Image.open(BytesIO(data)) as image:
            warnings.simplefilter("ignore")
            if image.width * image.height > MAX_FRAME_PIXELS:
                return data  # refused by whoever decodes it
            if not image.mode.startswith("I;16") and (image.mode != "I" or image.format == "TIFF"):
                return data
            values = np.asarray(image).astype(np.int64)
    except Exception:  # damaged: refused, with its reason, by whoever decodes it
        return data
    return encode_png(scale_to_grey(values, *(window or (values.min(), values.max()))))


def _may_be_16_bit(data: bytes) -> bool:
    """Whether a header allows for 16 bits; only a PNG's says so at a fixed place."""
    return data[24:25] == b"\x10" if data[:4] == b"\x89PNG" else True


def read_dicom(name: str, data: bytes, window: Window | None) -> NDArray[np.uint8]:
    """The first frame as its file wants it seen: (rows, columns), or with three colours."""
    try:
        import pydicom
        from pydicom import pixels
    except ImportError as error:
        raise DataError(f"{name} is DICOM; pip install 'fedvlm[dicom]'") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tags that nothing here looks at
            file = pydicom.dcmread(BytesIO(data))
            if int(file.Rows) * int(file.Columns) > MAX_FRAME_PIXELS:
                raise DataError(f"{name} has more than {MAX_FRAME_PIXELS:,} pixels; scale it down first")
            values = pixels.pixel_array(file, index=0)
            if values.ndim == 3:
                return values if values.dtype == np.uint8 else scale_to_grey(values, 0, values.max())
            values = pixels.apply_rescale(values, file)
            file_window = _window(file)
            if window is None and file_window is None and "VOILUTSequence" in file:
                values = pixels.apply_voi_lut(values, file)
    except DataError:
        raise
    except Exception as error:  # its words may quote a tag
        raise DataError(f"{name} is DICOM that cannot be read ({type(error).__name__}); replace or remove it") from None
    out = scale_to_grey(values, *(window or file_window or (values.min(), values.max())))
    return 255 - out if file.get("PhotometricInterpretation") == "MONOCHROME1" else out


def _window(file: Any) -> Window | None:
    """The first window of the file, by the standard's linear function."""
    tags = [file.get(key) for key in ("WindowCenter", "WindowWidth")]
    if any(tag is None or tag == "" for tag in tags):
        return None
    centre, width = (float(tag if isinstance(tag, str | int | float) else next(iter(tag))) for tag in tags)
    if str(file.get("VOILUTFunction", "LINEAR")) == "LINEAR":
        centre, width = centre - 0.5, width - 1
    return centre - width / 2, centre + max(width, 1e-6) / 2
