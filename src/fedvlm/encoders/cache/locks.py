"""Locks between processes; the system lets go of them when a process dies, however it dies."""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedvlm.errors import DataError


@contextmanager
def file_lock(path: Path, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """A whole-file lock; without `wait`, BlockingIOError if another process is in the way."""
    file = _open(path)
    try:
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        with _explained(path):
            fcntl.flock(file, how if wait else how | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


class Claims:
    """Which images a process is at work on, so that two processes share the work.

    A claim is a lock on one byte of an empty file, at a place the digest says. Claims only save
    work: without them both processes encode the same image and the second append does nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, _open(path)

    def take(self, digest: bytes) -> bool:
        """False if another process has this image in hand."""
        with suppress(BlockingIOError), _explained(self._path):
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(digest))
            return True
        return False

    def release(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _place(digest))

    def wait(self, digest: bytes) -> None:
        """Until whoever has it is done or dead; never while holding claims, or two could wait."""
        with _explained(self._path):
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _place(digest))
        self.release([digest])

    def close(self) -> None:
        os.close(self._file)


def _place(digest: bytes) -> int:
    return int.from_bytes(digest[:7], "big")


def _open(path: Path) -> int:
    with _explained(path):
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise DataError(
            f"cannot lock {path} ({error.strerror or error}); "
            "point FEDVLM_CACHE to a directory on a disk you can write to"
        ) from error
