"""Keep tensors on disk that do not fit into memory: client states, and rows of mapped files.

A kernel maps far more around a row than the row itself, up to megabytes, and counts it as memory of the process. So
rows are read from the file and not through the map, and a pass over all of them releases their pages.
"""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import prod
from pathlib import Path
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.errors import DataError
from fedvlm.storage import files
from fedvlm.storage.files import atomic_write, explain_os_errors, make_folder
from fedvlm.tensors import Tensors, copy, count_bytes

DIGEST_BYTES = 16  # bytes of a record's digest


class ClientStateStore(Mapping[str, Tensors]):
    """Keep the local tensors of many clients in one file, with two slots per client.

    New tensors go to the slot that is not committed, so that a kill at any moment leaves the committed state intact.
    The file is sparse where clients have not taken part.
    """

    def __init__(self, path: Path, ids: Sequence[str], template: Tensors) -> None:
        self.path, self.template = path, template
        self.index_of = {id: number for number, id in enumerate(sorted(ids))}
        self.size = count_bytes(template) + DIGEST_BYTES
        self.committed = np.zeros(len(self.index_of), np.int8)  # 0: nothing, else the first or second
        self.current = self.committed.copy()
        with explain_os_errors(path):
            make_folder(path.parent)
            self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __getitem__(self, id: str) -> Tensors:
        number = self.index_of[id]
        if not self.current[number]:
            raise KeyError(id)
        data = os.pread(self.file, self.size, self._offset(number))
        return _decode_state(self.path, id, data, self.template)

    def __iter__(self) -> Iterator[str]:
        return (id for id, number in self.index_of.items() if self.current[number])

    def __len__(self) -> int:
        return int((self.current > 0).sum())

    def put(self, states: Mapping[str, Tensors]) -> None:
        for id, tensors in states.items():
            number, bytes_ = self.index_of[id], self._encode_state(id, tensors)
            self.current[number] = 2 if self.committed[number] == 1 else 1
            with explain_os_errors(self.path):
                os.pwrite(self.file, bytes_ + _digest(id, bytes_), self._offset(number))

    def commit(self) -> Tensor:
        """Return (clients,) the slot of each client's current state, which is kept until the next commit."""
        with explain_os_errors(self.path):
            os.fsync(self.file)
        self.committed = self.current.copy()
        return torch.from_numpy(self.committed.copy())

    def restore(self, committed: Tensor) -> None:
        self.committed = committed.numpy().copy()
        self.current = self.committed.copy()

    def save(self, path: Path, ids: Sequence[str]) -> Tensor:
        """Write states of clients into a file of the record; return (ids,) their positions, -1 for none."""
        numbers = np.array([self.index_of[id] for id in ids], np.int64)
        places = np.where(self.current[numbers] > 0, np.cumsum(self.current[numbers] > 0) - 1, -1)
        with atomic_write(path) as draft_path, draft_path.open("wb") as file:
            for number in numbers[places >= 0].tolist():
                file.write(os.pread(self.file, self.size, self._offset(number)))
        return torch.from_numpy(places)

    def close(self) -> None:
        """Close and delete the file; the final states are in the training's outcome."""
        os.close(self.file)
        self.path.unlink(missing_ok=True)

    def _offset(self, number: int) -> int:
        return (2 * number + int(self.current[number]) - 1) * self.size

    def _encode_state(self, id: str, tensors: Tensors) -> bytes:
        def schema(state: Tensors) -> dict[str, tuple[torch.dtype, torch.Size]]:
            return {key: (value.dtype, value.shape) for key, value in state.items()}

        if schema(tensors) != schema(self.template):
            raise DataError(
                f"the local tensors of {id} are {schema(tensors)}, not {schema(self.template)} as init "
                "gives them; a method of so many clients keeps their names and shapes"
            )
        arrays = (tensors[key].detach().contiguous().reshape(-1) for key in self.template)
        return b"".join(array.view(torch.uint8).numpy().tobytes() for array in arrays)


class SavedClientStates(Mapping[str, Tensors]):
    """Read client states that `save` wrote one by one; a client without one has the initial state."""

    def __init__(self, path: Path, ids: Sequence[str], initial: Tensors, places: Tensor) -> None:
        self.path, self.initial = path, initial
        self.position_of = dict(zip(ids, places.tolist(), strict=True))

    def __getitem__(self, id: str) -> Tensors:
        place, size = self.position_of[id], count_bytes(self.initial) + DIGEST_BYTES
        if place < 0:
            return copy(self.initial)
        try:
            with self.path.open("rb") as file:
                file.seek(place * size)
                return _decode_state(self.path, id, file.read(size), self.initial)
        except FileNotFoundError as error:
            raise DataError(f"there is no {self.path}; run again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.position_of)

    def __len__(self) -> int:
        return len(self.position_of)


def _decode_state(path: Path, id: str, data: bytes, template: Tensors) -> Tensors:
    body = bytearray(data[:-DIGEST_BYTES])
    if len(data) != count_bytes(template) + DIGEST_BYTES or _digest(id, body) != data[-DIGEST_BYTES:]:
        raise DataError(f"{path} is damaged: the tensors of {id}; delete it and run again")
    out, offset = {}, 0
    for key, value in template.items():
        tensor = torch.frombuffer(body, dtype=value.dtype, count=value.numel(), offset=offset)
        out[key] = tensor.reshape(value.shape)
        offset += value.numel() * value.element_size()
    return out


def _digest(id: str, body: bytes | bytearray) -> bytes:
    key = blake2b(id.encode(), digest_size=32).digest()
    return blake2b(body, digest_size=DIGEST_BYTES, key=key).digest()


MAX_IN_MEMORY_BYTES = 256 << 20  # bytes of rows from which they are not all in memory
MAX_GAP_BYTES = 16 << 10  # bytes between two rows that are read over rather than left out
CHUNK_BYTES = 32 << 20  # bytes of a pass that are in memory at once
MAX_BUFFERS_PER_CALL = 500  # pieces of one call; systems take a thousand
# Files without a name that are mapped: where the map begins, and a descriptor. An inode would not
# tell them apart: two disks have the same ones.
_descriptors: dict[int, int] = {}


class PagedRows:
    """Rows (rows, width) of a mapped tensor, read from its file."""

    def __init__(self, x: Tensor, file: int, place: int) -> None:
        self.x, self.file, self.offset = x, file, place
        finalize(self, os.close, file)

    def take(self, index: NDArray[np.int64]) -> Tensor:
        """Return a copy (index, width) in memory."""
        rows, inverse = np.unique(index, return_inverse=True)
        return self.read(rows).index_select(0, torch.from_numpy(inverse.reshape(-1)))

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        """Return a copy (rows, width) in memory of sorted, distinct rows."""
        out = torch.empty(len(rows), self.x.shape[1], dtype=self.x.dtype)
        if not out.numel():
            return out
        size = out[0].nbytes
        target = memoryview(out.view(torch.uint8).numpy().reshape(-1).data)
        starts = np.concatenate([[0], np.flatnonzero(np.diff(rows) > 1) + 1, [len(rows)]])
        gaps = np.diff(rows)[starts[1:-1] - 1] - 1
        buffers: list[memoryview] = []
        offset, discarded = int(rows[0]) * size, memoryview(bytearray(MAX_GAP_BYTES))
        for first, end, gap in zip(
            starts[:-1].tolist(), starts[1:].tolist(), [*(gaps * size).tolist(), MAX_GAP_BYTES + 1], strict=True
        ):
            buffers.append(target[first * size : end * size])
            if gap <= MAX_GAP_BYTES and len(buffers) < MAX_BUFFERS_PER_CALL:
                buffers.append(discarded[:gap])  # one call over a small gap is cheaper than two
                continue
            self._fill(buffers, offset)
            offset, buffers = int(rows[end]) * size if end < len(rows) else 0, []
        return out

    def _fill(self, buffers: list[memoryview], offset: int) -> None:
        expected_bytes = sum(map(len, buffers))
        count = os.preadv(self.file, buffers, self.offset + offset)
        if count == expected_bytes:
            return
        if not count:
            raise DataError("the file of these rows has become shorter; write it again")
        while count >= len(buffers[0]):  # a call may give less than is asked for
            count, offset = count - len(buffers[0]), offset + len(buffers[0])
            buffers = buffers[1:]
        self._fill([buffers[0][count:], *buffers[1:]], offset + count)


def page_rows(x: object) -> PagedRows | None:
    """Return a reader for a large tensor that is a private map of a file; None for others."""
    if not isinstance(x, Tensor) or x.device.type != "cpu" or x.ndim != 2:
        return None
    if x.nbytes <= MAX_IN_MEMORY_BYTES or not x.is_contiguous():
        return None
    for first, end, offset, inode, path in _memory_maps():
        if first <= x.data_ptr() and x.data_ptr() + x.nbytes <= end:
            file = os.dup(_descriptors[first]) if first in _descriptors else _reopen_file(inode, path)
            return None if file is None else PagedRows(x, file, offset + x.data_ptr() - first)
    return None


def _memory_maps() -> Iterator[tuple[int, int, int, int, str]]:
    """Yield start, end, file offset, inode and name of all private maps of files."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not on Linux
        return
    for line in lines:
        span, rights, offset, _, inode, *name = line.split(maxsplit=5)
        first, end = (int(bound, 16) for bound in span.split("-"))
        if rights[3] == "p" and int(inode):
            yield first, end, int(offset, 16), int(inode), "".join(name)


def _reopen_file(inode: int, path: str) -> int | None:
    """Return a descriptor of the mapped file itself, if it still exists."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    if os.fstat(file).st_ino == inode:
        return file
    os.close(file)
    return None


def iterate_chunks(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield all rows in chunks, each with the number of its first row, and release their memory."""
    pages = _pages(x) if x.nbytes > CHUNK_BYTES else None
    size = max(1, CHUNK_BYTES // max(1, x[:1].nbytes))
    for first in range(0, len(x), size):
        yield first, x[first : first + size]
        if pages is not None:
            release_pages(pages)


def _pages(x: Tensor) -> tuple[int, int] | None:
    place = x.data_ptr()
    for first, end, *_ in _memory_maps():
        if first <= place and place + x.nbytes <= end and x.is_contiguous():
            low = place // mmap.PAGESIZE * mmap.PAGESIZE
            return low, -(-(place + x.nbytes - low) // mmap.PAGESIZE) * mmap.PAGESIZE
    return None


def release_pages(pages: tuple[int, int]) -> None:
    """Release clean pages of a map from this process; they remain in the file."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None and hasattr(mmap, "MADV_DONTNEED"):
        advise(ctypes.c_void_p(pages[0]), ctypes.c_size_t(pages[1]), mmap.MADV_DONTNEED)


def concatenate_rows(folder: Path, shape: tuple[int, int], parts: Iterable[Tensor]) -> Tensor:
    """Concatenate float32 rows; a large result lies in an unnamed file that is deleted with it."""
    if 4 * prod(shape) <= MAX_IN_MEMORY_BYTES:
        return torch.cat(list(parts))
    with files.explain_os_errors(folder):
        files.make_folder(folder)
        return _write_unnamed_file(folder, shape, parts)


def _write_unnamed_file(folder: Path, shape: tuple[int, int], parts: Iterable[Tensor]) -> Tensor:
    with tempfile.TemporaryFile(dir=folder) as file:
        for part in parts:
            file.write(part.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        array = np.memmap(file, np.float32, "c", shape=shape)
        descriptor = os.dup(file.fileno())
    address = array.ctypes.data
    _descriptors[address] = descriptor
    finalize(array, _close, address)
    return torch.from_numpy(array)


def _close(address: int) -> None:
    os.close(_descriptors.pop(address))
