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
def explain_os_errors(path: Path) -> Iterator[None]:
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
            raise DataError(f"cannot write {path} ({error.strerror}); choose another place") from error
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A place beside a file to write it to; it takes the file's place when all went well.

    A reader finds the old file or the new one, also after a kill or a power cut.
    """
    draft_path = path.with_name(f".{path.name}.{os.getpid()}")
    with explain_os_errors(path):
        make_folder(path.parent)
        try:
            yield draft_path
            draft_path.chmod(stat.S_IMODE(draft_path.stat().st_mode) & _folder_mode(path.parent))
            with open(draft_path, "rb") as file:
                os.fsync(file.fileno())
            os.replace(draft_path, path)
        finally:
            draft_path.unlink(missing_ok=True)


def _folder_mode(folder_path: Path) -> int:
    """What others may do in a folder, they may at most do with what is in it."""
    return stat.S_IMODE(folder_path.stat().st_mode) & 0o777


def make_folder(path: Path) -> None:
    """A folder, and those above it, each as private as the one it is in."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):  # another process was as quick
            path.mkdir(mode=_folder_mode(path.parent))


def make_private_folder(path: Path) -> None:
    """A folder that only its owner can enter; one that is there stays as its owner made it."""
    with explain_os_errors(path), suppress(FileExistsError):
        make_folder(path.parent)
        path.mkdir(mode=0o700)


@contextmanager
def open_for_append(path: Path) -> Iterator[IO[bytes]]:
    """A file that grows, to be read as well; as private as its folder."""
    with explain_os_errors(path):
        make_folder(path.parent)
        mode = _folder_mode(path.parent) & 0o666
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "a+b") as file:
            yield file


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with atomic_write(path) as draft_path, os.fdopen(os.open(draft_path, flags, mode), "wb") as file:
        file.write(data)


MAX_IMAGE_BYTES = 256 << 20  # bytes of one image's file: above any the pixel limit lets through
SPECIAL_FILE_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


def read_regular(path: Path, max_bytes: int = MAX_IMAGE_BYTES) -> bytes:
    """A file of at most so many bytes; what could wait for ever or act is told and not opened."""
    _require_regular(path, os.stat(path).st_mode)
    # another may have taken its place since: opening waits for nobody, and it is looked at again
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        _require_regular(path, status.st_mode)
        data = file.read(max_bytes + 1) if status.st_size <= max_bytes else b""
    if len(data) > max_bytes or status.st_size > max_bytes:
        raise DataError(f"{path} has more than {max_bytes:,} bytes; make it smaller or leave it out")
    return data


class NotRegularFileError(DataError):
    """A FIFO, a socket, a device: nothing that was ever an image."""


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        file_kind = SPECIAL_FILE_KINDS.get(stat.S_IFMT(mode), "a device")
        raise NotRegularFileError(f"{path} is {file_kind} and no file, and was not opened; remove it")


LOCK_ATTEMPTS, LOCK_RETRY_SECONDS = 4, 0.02  # at a lock, and seconds between: `busy` has it while it looks


@contextmanager
def exclusive_lock(lock: Path, busy_message: str) -> Iterator[None]:
    """One process at a time; `busy` is what another is told. The lock goes with the process."""
    with open_for_append(lock) as file:
        for attempts_left in reversed(range(LOCK_ATTEMPTS)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not attempts_left:
                    raise DataError(busy_message) from error
                sleep(LOCK_RETRY_SECONDS)
        try:
            yield
        finally:  # also of a child process that has the file open still
            fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(lock: Path) -> bool:
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
    kind, _, location = encoder.partition(":")
    return slug(Path(location).stem if kind == "store" else Path(data).name)
