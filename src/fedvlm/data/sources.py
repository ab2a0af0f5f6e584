"""Sources of image bytes: files, members of a .zip, rows of an Arrow table, pixels; 16-bit images and DICOM as PNG.

Only the pixels of a DICOM file go on: none of its tags reaches a digest, a record or an encoder.
"""

import stat
import warnings
import zlib
from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from os import getpid, scandir
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedvlm.data.table import Source
from fedvlm.errors import DataError, SettingsError
from fedvlm.plugins import require
from fedvlm.storage.files import MAX_IMAGE_BYTES, read_regular

COMMON_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SUFFIXES = (*COMMON_SUFFIXES, ".dcm", ".dicom")
SUFFIXES_16_BIT = (".png", ".tif", ".tiff", ".pgm")  # files that may hold 16 bits
MAX_BLOCK_BYTES = 65535  # of a stored PNG block
MAX_FRAME_PIXELS = 64_000_000  # of a DICOM frame; a header may claim any number
Window = tuple[float, float]  # the values shown as black and as white


def is_image(path: str) -> bool:
    return path.lower().endswith(SUFFIXES)


def is_hidden(path: str) -> bool:
    """Whether a file is hidden: .DS_Store, .ipynb_checkpoints/..., __MACOSX/..."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


class NamedSource:
    """Images with a name each."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, row: int) -> str:
        return self.names[row]


class Files(NamedSource):
    """Files below a folder."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        super().__init__(paths)
        self.root = root

    def read(self, row: int) -> bytes:
        try:
            return read_regular(self.root / self.names[row], MAX_IMAGE_BYTES)
        except OSError as error:
            file = self.root / self.names[row]
            raise DataError(f"{file} cannot be read ({error.strerror}); put it back or leave it out") from error


class Archive(NamedSource):
    """Members of a .zip, read in place; each process opens it itself, so that the source can be pickled."""

    def __init__(self, path: Path, members: Sequence[str]) -> None:
        super().__init__(members)
        self.path = path
        self._open: ZipFile | None = None
        self._owner = 0  # the process that opened it: a forked one must not share the file position

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def read(self, row: int) -> bytes:
        try:
            if self._open is None or self._owner != getpid():
                self._open, self._owner = ZipFile(self.path), getpid()
            # the size in the header may be false, so unpacking is limited
            with self._open.open(self.names[row]) as member:
                data = member.read(MAX_IMAGE_BYTES + 1)
        except (OSError, BadZipFile, zlib.error, RuntimeError) as error:
            raise DataError(f"{self.names[row]} of {self.path} cannot be read ({error}); get it again") from error
        if len(data) > MAX_IMAGE_BYTES:
            problem = f"{self.names[row]} of {self.path} unpacks to more than {MAX_IMAGE_BYTES:,} bytes"
            raise DataError(f"{problem}; leave it out")
        return data


class Arrow:
    """Rows of a column of undecoded images of the `datasets` library."""

    def __init__(self, rows: Any, image: str, title: str) -> None:
        self.rows, self.image, self.title = rows, image, title

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, row: int) -> str:
        return f"{self.title}[{row}]"

    def read(self, row: int) -> bytes:
        cell = self.rows[row][self.image]
        if cell and cell.get("bytes"):
            return bytes(cell["bytes"])
        try:
            return read_regular(Path(cell["path"]), MAX_IMAGE_BYTES)
        except (OSError, TypeError) as error:
            raise DataError(f"{self.name(row)} has neither bytes nor a file; save it with its images") from error


class Pixels(NamedSource):
    """Grey images in memory, read as PNG."""

    def __init__(self, pixels: NDArray[np.uint8], names: Sequence[str]) -> None:
        super().__init__(names)
        self.pixels = pixels  # (images, height, width)

    def read(self, row: int) -> bytes:
        return encode_png(self.pixels[row])


class SourceSubset:
    """Some images of another source."""

    def __init__(self, source: Any, rows: NDArray[np.int64]) -> None:
        self.source, self.rows = source, rows

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, row: int) -> str:
        return str(self.source.name(int(self.rows[row])))

    def read(self, row: int) -> bytes:
        return bytes(self.source.read(int(self.rows[row])))


def list_folder(root: Path) -> tuple[list[str], list[str]]:
    """List images and folders below a folder, relative and sorted; refuse links that lead out."""
    files, folders, waiting = [], [], [""]
    while waiting:
        above = waiting.pop()
        with scandir(root / above) as entries:
            for entry in entries:
                path = above + entry.name
                if is_hidden(entry.name):
                    continue
                if entry.is_symlink():
                    check_link(root / path, root)
                if entry.is_dir():
                    folders.append(path)
                    waiting.append(f"{path}/")
                elif is_image(path):
                    files.append(path)
    return sorted(files), sorted(folders)


def list_ignored_files(root: Path) -> list[str]:
    """List files below a folder or in a .zip that are neither images nor hidden."""
    if root.is_dir():
        names = [entry.relative_to(root).as_posix() for entry in root.rglob("*") if entry.is_file()]
    else:
        with ZipFile(root) as archive:
            names = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
    return sorted(name for name in names if not is_hidden(name) and not is_image(name))


def check_link(entry: Path, root: Path) -> None:
    target = entry.resolve()
    if not target.exists():
        raise DataError(f"{entry} is a link to {target}, which is not there; remove the link")
    if target.is_dir():
        raise DataError(f"{entry} is a link to the folder {target}; put the folder itself in its place")
    if not target.is_relative_to(root.resolve()):
        raise DataError(f"{entry} is a link to {target}, outside {root}; put the file itself in its place")


def list_archive(path: Path) -> tuple[list[str], list[str]]:
    """List images and folders of a .zip, sorted; refuse members that could lead out of it."""
    try:
        with ZipFile(path) as archive:
            members = archive.infolist()
    except (BadZipFile, OSError) as error:
        raise DataError(f"{path} cannot be opened as a .zip ({error}); get it again") from error
    for member in members:
        check_member(path, member)
    visible = [member for member in members if not is_hidden(member.filename)]
    files = sorted(member.filename for member in visible if not member.is_dir() and is_image(member.filename))
    folders = {member.filename.rstrip("/") for member in visible if member.is_dir()}
    folders |= {str(parent) for file in files for parent in PurePosixPath(file).parents} - {"."}
    if len(set(files)) < len(files):
        twice = next(member for member, next_member in pairwise(files) if member == next_member)
        raise DataError(f"{path} has two members called {twice}; pack it again")
    return files, sorted(folders)


def check_member(path: Path, member: ZipInfo) -> None:
    name = member.orig_filename  # as stored: zipfile replaces backslashes on some systems
    problem = ""
    if name.startswith(("/", "\\")) or (len(name) > 1 and name[1] == ":"):
        problem = "has an absolute name"
    elif ".." in name.replace("\\", "/").split("/"):
        problem = "leads out of the archive"
    elif "\\" in name or "\0" in name:
        problem = "has a backslash or a zero byte in its name"
    elif stat.S_ISLNK(member.external_attr >> 16):
        problem = "is a link"
    elif member.flag_bits & 1:
        problem = "is encrypted"
    elif member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        problem = "is compressed by another method than deflate"
    if problem:
        raise DataError(f"the member {name!r} of {path} {problem}; pack plain files only")


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode (height, width) grey or (height, width, 3) colour as PNG without compression.

    Written here because compressors differ between versions, and so would the digests of the images.
    """
    height, width = pixels.shape[:2]
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0))).tobytes()  # each line unfiltered
    starts = range(0, len(lines), MAX_BLOCK_BYTES)
    body = b"\x78\x01" + b"".join(_block(lines[at : at + MAX_BLOCK_BYTES], at == starts[-1]) for at in starts)
    colour = b"\x02" if pixels.ndim == 3 else b"\x00"
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08" + colour + b"\0\0\0"
    chunks = ((b"IHDR", head), (b"IDAT", body + zlib.adler32(lines).to_bytes(4, "big")), (b"IEND", b""))
    sealed = ((len(data), kind + data) for kind, data in chunks)
    bodies = (size.to_bytes(4, "big") + data + zlib.crc32(data).to_bytes(4, "big") for size, data in sealed)
    return b"\x89PNG\r\n\x1a\n" + b"".join(bodies)


def _block(data: bytes, last: bool) -> bytes:
    size = len(data)
    return bytes([last]) + size.to_bytes(2, "little") + (size ^ MAX_BLOCK_BYTES).to_bytes(2, "little") + data


def scale_to_grey(values: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    """Scale numbers so that `low` is black and `high` is white."""
    scaled = (values.astype(np.float64) - low) / max(high - low, 1e-12)
    out: NDArray[np.uint8] = np.rint(255 * scaled.clip(0, 1)).astype(np.uint8)
    return out


class EightBitSource:
    """Another source with DICOM and 16-bit images as 8-bit PNG; other images are unchanged."""

    def __init__(self, source: Source, window: Window | None = None) -> None:
        self.source, self.window = source, window

    def __len__(self) -> int:
        return len(self.source)

    def name(self, row: int) -> str:
        return self.source.name(row)

    def read(self, row: int) -> bytes:
        return to_eight_bit(self.source.name(row), self.source.read(row), self.window)


def check_window(value: Any) -> Window | None:
    """Check the setting `source.window = [low, high]`."""
    if value is None:
        return None
    is_numeric = isinstance(value, Sequence) and all(isinstance(bound, int | float) for bound in value)
    if not is_numeric or len(value) != 2 or not value[0] < value[1]:
        raise SettingsError(f"source.window must be the values that are black and white, as [-160, 240]; got {value!r}")
    return float(value[0]), float(value[1])


def to_eight_bit(name: str, data: bytes, window: Window | None) -> bytes:
    """Return the bytes of an image, converted if it has more than 8 bits."""
    if data[128:132] == b"DICM":
        return encode_png(read_dicom(name, data, window))
    is_8_bit_png = data[:4] == b"\x89PNG" and data[24:25] != b"\x10"  # only PNG has the depth at a fixed place
    if not name.lower().endswith(SUFFIXES_16_BIT) or is_8_bit_png:
        return data
    try:
        with warnings.catch_warnings(), Image.open(BytesIO(data)) as image:
            warnings.simplefilter("ignore")
            if image.width * image.height > MAX_FRAME_PIXELS:
                return data  # the decoder refuses it
            if not image.mode.startswith("I;16") and (image.mode != "I" or image.format == "TIFF"):
                return data
            values = np.asarray(image).astype(np.int64)
    except Exception:  # damaged: the decoder refuses it with the reason
        return data
    return encode_png(scale_to_grey(values, *(window or (values.min(), values.max()))))


def read_dicom(name: str, data: bytes, window: Window | None) -> NDArray[np.uint8]:
    """Read the first frame with the window of the file: (height, width), or with three colours."""
    pydicom, pixels = (require(part, f"{name} is DICOM", "dicom", DataError) for part in ("pydicom", "pydicom.pixels"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tags that are not used
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
    except Exception as error:  # its message may quote a tag
        raise DataError(f"{name} is DICOM that cannot be read ({type(error).__name__}); replace or remove it") from None
    out = scale_to_grey(values, *(window or file_window or (values.min(), values.max())))
    return 255 - out if file.get("PhotometricInterpretation") == "MONOCHROME1" else out


def _window(file: Any) -> Window | None:
    """Return the first window of the file, by the linear function of the standard."""
    tags = [file.get(key) for key in ("WindowCenter", "WindowWidth")]
    if any(tag is None or tag == "" for tag in tags):
        return None
    centre, width = (float(tag if isinstance(tag, str | int | float) else next(iter(tag))) for tag in tags)
    if str(file.get("VOILUTFunction", "LINEAR")) == "LINEAR":
        centre, width = centre - 0.5, width - 1
    return centre - width / 2, centre + max(width, 1e-6) / 2
