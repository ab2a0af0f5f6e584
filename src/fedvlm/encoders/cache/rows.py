"""Tables of rows on disk, found by a digest, appended by several processes, and never moved.

`NAME.rows` holds the raw rows. `NAME.index` holds one record per row: the digest, the row's number, the row's checksum
and the record's own checksum. Rows reach the disk before their records, so a complete record always points at a
complete row. Rows without a record and a partial record at the end are left by a kill and ignored. The system releases
file locks when a process dies.
"""

import fcntl
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fedvlm.errors import DataError
from fedvlm.storage import files

REMEDY = "point FEDVLM_CACHE to a directory on a disk you can write to"
DROP_HINT = "`fedvlm cache verify --drop` removes"


@contextmanager
def file_lock(path: Path, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Lock a file; without `wait`, raise BlockingIOError if another process holds the lock."""
    file = _open(path)
    try:
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        with explain_write_errors(path, "lock"):
            fcntl.flock(file, how if wait else how | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


class Claims:
    """Claims of images by processes, so that two processes share the work.

    A claim is a lock on one byte of an empty file, at an offset given by the digest. Claims only save work: without
    them both processes encode the same image and the second append does nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, _open(path)

    def take(self, digest: bytes) -> bool:
        """Claim an image; return False if another process has claimed it."""
        with suppress(BlockingIOError), explain_write_errors(self._path, "lock"):
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(digest))
            return True
        return False

    def release(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _place(digest))

    def wait(self, digest: bytes) -> None:
        """Wait until the process that claimed it is done or dead; never while holding claims, to avoid a deadlock."""
        with explain_write_errors(self._path, "lock"):
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _place(digest))
        self.release([digest])

    def close(self) -> None:
        os.close(self._file)


def _place(digest: bytes) -> int:
    return int.from_bytes(digest[:7], "big")


def _open(path: Path) -> int:
    with explain_write_errors(path, "lock"):
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


@contextmanager
def explain_write_errors(path: Path, verb: str = "write") -> Iterator[None]:
    """Turn a full or read-only disk into a DataError with a remedy."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise DataError(f"cannot {verb} {path} ({error.strerror or error}); make room there, or {REMEDY}") from error


RECORD = struct.Struct("<32sQII")  # digest, row, checksum of the row, checksum of the record
RECORD_BODY_BYTES = RECORD.size - 4  # covered by the checksum of the record


@dataclass(frozen=True)
class DamagedRow:
    """One damaged row, or one damaged record of the index."""

    table: str
    row: int | None
    digest: str  # hex; empty for a damaged record
    reason: str


class RowFile:
    def __init__(self, stem: Path, lock: Path, dtype: str, shape: tuple[int, ...]) -> None:
        self.name = stem.name
        self.dtype, self.shape = np.dtype(dtype).newbyteorder("<"), shape
        self.size = prod(shape) * self.dtype.itemsize  # bytes of one row
        self._rows, self._index = Path(f"{stem}.rows"), Path(f"{stem}.index")
        self._lock, self.folder = lock, stem.parent
        self._rows_by_digest: dict[bytes, tuple[int, int]] = {}  # digest -> row, checksum of the row
        self._read = 0  # bytes of the index that are read
        self._end = 0  # one past the last row of a record
        self.damaged: list[int] = []  # numbers of the records whose checksum is wrong
        self.refresh()

    def __len__(self) -> int:
        return len(self._rows_by_digest)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows_by_digest

    def refresh(self) -> None:
        """Read what other processes appended; the lock excludes an append in progress."""
        if self._index.exists() and self._index.stat().st_size >= self._read + RECORD.size:
            with file_lock(self._lock, shared=True):
                self._read_index()

    def _read_index(self) -> None:
        if not self._index.exists():
            return
        with self._index.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        view = memoryview(data)
        for start in range(0, len(data) - len(data) % RECORD.size, RECORD.size):
            digest, row, checksum, record_checksum = RECORD.unpack_from(data, start)
            if crc32(view[start : start + RECORD_BODY_BYTES]) != record_checksum:
                self.damaged.append((self._read + start) // RECORD.size)
                continue
            self._rows_by_digest[digest] = row, checksum
            self._end = max(self._end, row + 1)
        self._read += len(data) - len(data) % RECORD.size

    def append(self, digests: Sequence[bytes], values: NDArray[Any]) -> None:
        """Append the rows that are missing; when it returns, they survive a power failure."""
        values = np.ascontiguousarray(values, dtype=self.dtype)
        if values.shape != (len(digests), *self.shape):
            raise DataError(f"{self.name} takes rows of {self.shape}, not {values.shape[1:]}")
        with file_lock(self._lock):
            self._read_index()
            new_rows = {d: i for i, d in enumerate(digests) if d not in self._rows_by_digest}
            if not new_rows:
                return
            data = [values[i].tobytes() for i in new_rows.values()]
            size = self._rows.stat().st_size if self._rows.exists() else 0
            # after what a kill left, and never a number that was used before
            first = max(-(-size // self.size), self._end)
            pairs = enumerate(zip(new_rows, data, strict=True), first)
            records = [_record(digest, row, crc32(body)) for row, (digest, body) in pairs]
            _write(self._rows, first * self.size, data)
            try:
                _write(self._index, self._read, records)
            except DataError:
                os.truncate(self._rows, size)
                raise
            self._read_index()

    def read(self, digests: Sequence[bytes]) -> NDArray[Any]:
        """(digests, *shape) read rows into memory and check them."""
        values: NDArray[Any] = self._map()[[self._rows_by_digest[digest][0] for digest in digests]]
        flat = values.reshape(len(digests), prod(self.shape)).view(np.uint8)
        check_sums(flat, self.sums(digests), self._rows, [self._rows_by_digest[digest][0] for digest in digests])
        return values

    def sums(self, digests: Sequence[bytes]) -> NDArray[np.uint32]:
        """Return the checksum of each row."""
        return np.array([self._rows_by_digest[digest][1] for digest in digests], np.uint32)

    def mapped(self, digests: Sequence[bytes]) -> NDArray[Any]:
        """(digests, *shape) map rows that do not fit into memory; the reader checks them against `sums`.

        Rows in another order than the file's are copied to an unnamed temporary file on the same disk.
        """
        rows = [self._rows_by_digest[digest][0] for digest in digests]
        everything = self._map()
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return everything[rows[0] : rows[0] + len(rows)]
        with explain_write_errors(self._rows), tempfile.TemporaryFile(dir=self._rows.parent) as file:
            for row in rows:
                file.write(everything[row].data)
            file.flush()
            return np.memmap(file, self.dtype, "c", shape=(len(rows), *self.shape))

    def _map(self) -> NDArray[Any]:
        """Map all rows; changes to the array never reach the file."""
        size = self._rows.stat().st_size if self._rows.exists() else 0
        if size < self._end * self.size:
            raise DataError(f"{self._rows} has {size} bytes, not {self._end * self.size}; {DROP_HINT} lost rows")
        if not self._end:
            return np.empty((0, *self.shape), self.dtype)
        return np.memmap(self._rows, self.dtype, "c", shape=(self._end, *self.shape))

    def verify(self) -> Iterator[DamagedRow]:
        """Check every row against its checksum."""
        for record in self.damaged:
            yield DamagedRow(self.name, None, "", f"record {record} of the index is damaged")
        with self._rows.open("rb") if self._rows.exists() else BytesIO() as file:
            for digest, (row, checksum) in self._rows_by_digest.items():
                file.seek(row * self.size)
                data = file.read(self.size)
                if len(data) < self.size:
                    yield DamagedRow(self.name, row, digest.hex(), "the file ends before this row")
                elif crc32(data) != checksum:
                    yield DamagedRow(self.name, row, digest.hex(), "the row is not what was written")

    def drop(self, digests: set[bytes]) -> None:
        """Rewrite the index without these rows and without damaged records."""
        kept = {digest: place for digest, place in self._rows_by_digest.items() if digest not in digests}
        records = [_record(digest, *place) for digest, place in kept.items()]
        with explain_write_errors(self._index):
            files.write_file(self._index, b"".join(records))
        self._rows_by_digest, self._read, self._end, self.damaged = {}, 0, 0, []
        self._read_index()


def check_sums(rows: NDArray[Any], sums: NDArray[np.uint32], location: Path | str, numbers: Sequence[int] = ()) -> None:
    """Refuse rows that differ from what was written."""
    for place, (row, checksum) in enumerate(zip(rows, sums.tolist(), strict=True)):
        if crc32(np.ascontiguousarray(row).reshape(-1).view(np.uint8).data) != checksum:
            row_name = f"row {numbers[place]}" if numbers else "a row"
            raise DataError(f"{row_name} of {location} is damaged; {DROP_HINT} it, and the next run encodes it")


def _record(digest: bytes, row: int, checksum: int) -> bytes:
    body = RECORD.pack(digest, row, checksum, 0)[:RECORD_BODY_BYTES]
    return body + struct.pack("<I", crc32(body))


def _write(path: Path, place: int, parts: Sequence[bytes]) -> None:
    """Write at an offset and flush to disk; on failure truncate the file there."""
    data = memoryview(b"".join(parts))
    with explain_write_errors(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(file, data[done:], place + done)
            os.fsync(file)
        except OSError:
            os.ftruncate(file, place)
            raise
        finally:
            os.close(file)
