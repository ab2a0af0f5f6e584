"""Files appear whole or not at all: written beside their place, synced, and renamed."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from time import sleep
from typing import IO

from fedvlm.errors import DataError


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Turns what a disk can refuse into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"the disk is full at {path}; free some space and resume: "
                "what was finished is still there, and nothing is half-written"
            ) from error
        if isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
            raise DataError(
                f"cannot write {path} ({error.strerror}); choose another place"
            ) from error
        raise


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """A place beside a file to write it to; it takes the file's place when all went well.

    A reader finds the old file or the new one, also after a kill or a power cut.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with disk(path):
        folder(path.parent)
        try:
            yield beside
            beside.chmod(stat.S_IMODE(beside.stat().st_mode) & _allowed(path.parent))
            with open(beside, "rb") as file:
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def _allowed(place: Path) -> int:
    """What others may do in a folder, they may at most do with what is in it."""
    return stat.S_IMODE(place.stat().st_mode) & 0o777


def folder(path: Path) -> None:
    """A folder, and those above it, each as private as the one it is in."""
    if not path.is_dir():
        folder(path.parent)
        with suppress(FileExistsError):  # another process was as quick
            path.mkdir(mode=_allowed(path.parent))


def private(path: Path) -> None:
    """A folder that only its owner can enter; one that is there stays as its owner made it."""
    with disk(path), suppress(FileExistsError):
        folder(path.parent)
        path.mkdir(mode=0o700)


@contextmanager
def appending(path: Path) -> Iterator[IO[bytes]]:
    """A file that grows, to be read as well; as private as its folder."""
    with disk(path):
        folder(path.parent)
        allowed = _allowed(path.parent) & 0o666
        made = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, allowed)
        with os.fdopen(made, "a+b") as file:
            yield file


def write(path: Path, data: bytes, mode: int = 0o666) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with draft(path) as beside, os.fdopen(os.open(beside, flags, mode), "wb") as file:
        file.write(data)


LARGEST = 256 << 20  # bytes of one image's file: above any the pixel limit lets through
SPECIAL = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


def read_regular(path: Path, most: int = LARGEST) -> bytes:
    """A file of at most so many bytes; what could wait for ever or act is told and not opened."""
    _regular(path, os.stat(path).st_mode)
    # another may have taken its place since: opening waits for nobody, and it is looked at again
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        _regular(path, found.st_mode)
        data = file.read(most + 1) if found.st_size <= most else b""
    if len(data) > most or found.st_size > most:
        raise DataError(f"{path} has more than {most:,} bytes; make it smaller or leave it out")
    return data


class NoFile(DataError):
    """A FIFO, a socket, a device: nothing that was ever an image."""


def _regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = SPECIAL.get(stat.S_IFMT(mode), "a device")
        raise NoFile(f"{path} is {what} and no file, and was not opened; remove it")


TRIES, MOMENT = 4, 0.02  # at a lock, and seconds between: `busy` has it while it looks


@contextmanager
def alone(lock: Path, busy: str) -> Iterator[None]:
    """One process at a time; `busy` is what another is told. The lock goes with the process."""
    with appending(lock) as file:
        for left in reversed(range(TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not left:
                    raise DataError(busy) from error
                sleep(MOMENT)
        try:
            yield
        finally:  # also of a child process that has the file open still
            fcntl.flock(file, fcntl.LOCK_UN)


def busy(lock: Path) -> bool:
    """Whether a process holds this lock now."""
    if not lock.exists():
        return False
    with open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def slug(name: str) -> str:
    """A file name for a training: readable, and different for different names."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:40]
    return plain if plain == name else f"{plain}-{sha256(name.encode()).hexdigest()[:8]}"


def data_name(data: str, encoder: str) -> str:
    """What the rows of a run are called in the name of a folder."""
    kind, _, place = encoder.partition(":")
    return slug(Path(place).stem if kind == "store" else Path(data).name)
