"""Where the bytes of images are: files below a folder, members of an archive, rows, pixels."""

import stat
import zlib
from collections.abc import Sequence
from itertools import pairwise
from os import getpid, scandir
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from fedvlm.data.png import encode_png
from fedvlm.errors import DataError
from fedvlm.storage.files import MAX_IMAGE_BYTES, read_regular

COMMON_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SUFFIXES = (*COMMON_SUFFIXES, ".dcm", ".dicom")


def is_image(path: str) -> bool:
    return path.lower().endswith(SUFFIXES)


def is_hidden(path: str) -> bool:
    """Files nobody sees: .DS_Store, .ipynb_checkpoints/..., __MACOSX/..."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


class Files:
    """Files below a folder."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        self.root, self.paths = root, list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, row: int) -> str:
        return self.paths[row]

    def read(self, row: int) -> bytes:
        try:
            return read_regular(self.root / self.paths[row], MAX_IMAGE_BYTES)
        except OSError as error:
            raise DataError(
                f"{self.root / self.paths[row]} cannot be read ({error.strerror}); "
                "put the file back or leave it out of the data set"
            ) from error


class Archive:
    """Members of a .zip, read in place; opened where it is read, so that it can be sent about."""

    def __init__(self, path: Path, members: Sequence[str]) -> None:
        self.path, self.members = path, list(members)
        self._open: ZipFile | None = None
        self._owner = 0  # the process that opened it: a forked one must not share its place

    def __len__(self) -> int:
        return len(self.members)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def name(self, row: int) -> str:
        return self.members[row]

    def read(self, row: int) -> bytes:
        try:
            if self._open is None or self._owner != getpid():
                self._open, self._owner = ZipFile(self.path), getpid()
            # the size a member claims may be a lie: unpacking ends by itself
            with self._open.open(self.members[row]) as member:
                data = member.read(MAX_IMAGE_BYTES + 1)
        except (OSError, BadZipFile, zlib.error, RuntimeError) as error:
            raise DataError(
                f"{self.members[row]} of {self.path} cannot be read ({error}); the archive is damaged, so get it again"
            ) from error
        if len(data) > MAX_IMAGE_BYTES:
            raise DataError(
                f"{self.members[row]} of {self.path} unpacks to more than {MAX_IMAGE_BYTES:,} bytes; leave it out"
            )
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
            raise DataError(
                f"{self.name(row)} has neither bytes nor a file ({cell!r}); save the data set with its images embedded"
            ) from error


class Pixels:
    """Grey images held as numbers, given out as PNG."""

    def __init__(self, pixels: NDArray[np.uint8], names: Sequence[str]) -> None:
        self.pixels, self.names = pixels, list(names)  # (rows, height, width)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, row: int) -> str:
        return self.names[row]

    def read(self, row: int) -> bytes:
        return encode_png(self.pixels[row])


class SourceSubset:
    """Some rows of another source."""

    def __init__(self, source: Any, rows: NDArray[np.int64]) -> None:
        self.source, self.rows = source, rows

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, row: int) -> str:
        return str(self.source.name(int(self.rows[row])))

    def read(self, row: int) -> bytes:
        return bytes(self.source.read(int(self.rows[row])))


def list_folder(root: Path) -> tuple[list[str], list[str]]:
    """Images and folders below a folder, relative and sorted; links that lead out are refused."""
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
    """Files below a folder or in a .zip that do not end as images do, hidden ones aside."""
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
    """Images and folders of a .zip, sorted; members that could lead out of it are refused."""
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
    name = member.orig_filename  # as stored: zipfile turns backslashes round on some systems
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
        problem = "is packed neither plainly nor by deflate, the two that are unpacked in steps,"
    if problem:
        raise DataError(f"the member {name!r} of {path} {problem}; pack plain files only")
