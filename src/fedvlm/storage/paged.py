"""Rows of a file that is mapped into memory, read so that only what is asked for is there.

A kernel maps far more around a row than the row, up to megabytes, and counts it as this process's.
So rows are read from the file, not through the map, and a pass over all of them lets go of them.
"""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.errors import DataError
from fedvlm.storage import files

LARGE = 256 << 20  # bytes of rows from which they are not all in memory
GAP = 16 << 10  # bytes between two rows that are read over rather than left out
STRETCH = 32 << 20  # bytes of a pass that are in memory at once
MOST = 500  # pieces of one call; systems take a thousand
# Files without a name that are mapped: where the map begins, and a descriptor. An inode would not
# tell them apart: two disks have the same ones.
_unnamed: dict[int, int] = {}


class Paged:
    """(rows, width) in a file, as a mapped tensor has them."""

    def __init__(self, x: Tensor, file: int, place: int) -> None:
        self.x, self.file, self.place = x, file, place
        finalize(self, os.close, file)

    def take(self, index: NDArray[np.int64]) -> Tensor:
        """(index, width) a copy in memory."""
        rows, where = np.unique(index, return_inverse=True)
        return self.read(rows).index_select(0, torch.from_numpy(where.reshape(-1)))

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        """(rows, width) a copy in memory of rows in their order, none of them twice."""
        out = torch.empty(len(rows), self.x.shape[1], dtype=self.x.dtype)
        if not out.numel():
            return out
        size = out[0].nbytes
        into = memoryview(out.view(torch.uint8).numpy().reshape(-1).data)
        starts = np.concatenate([[0], np.flatnonzero(np.diff(rows) > 1) + 1, [len(rows)]])
        gaps = np.diff(rows)[starts[1:-1] - 1] - 1
        asked: list[memoryview] = []
        place, junk = int(rows[0]) * size, memoryview(bytearray(GAP))
        for first, end, gap in zip(
            starts[:-1].tolist(),
            starts[1:].tolist(),
            [*(gaps * size).tolist(), GAP + 1],
            strict=True,
        ):
            asked.append(into[first * size : end * size])
            if gap <= GAP and len(asked) < MOST:
                asked.append(junk[:gap])  # one call over a small gap is cheaper than two
                continue
            self._fill(asked, place)
            place, asked = int(rows[end]) * size if end < len(rows) else 0, []
        return out

    def _fill(self, asked: list[memoryview], place: int) -> None:
        wanted = sum(map(len, asked))
        count = os.preadv(self.file, asked, self.place + place)
        if count == wanted:
            return
        if not count:
            raise DataError("the file of these rows has become shorter; write it again")
        while count >= len(asked[0]):  # a call may give less than is asked for
            count, place = count - len(asked[0]), place + len(asked[0])
            asked = asked[1:]
        self._fill([asked[0][count:], *asked[1:]], place + count)


def paged(x: object) -> Paged | None:
    """How to read the rows of a large tensor that is a private map of a file; None for others."""
    if not isinstance(x, Tensor) or x.device.type != "cpu" or x.ndim != 2:
        return None
    if x.nbytes <= LARGE or not x.is_contiguous():
        return None
    for first, end, offset, inode, path in _maps():
        if first <= x.data_ptr() and x.data_ptr() + x.nbytes <= end:
            file = os.dup(_unnamed[first]) if first in _unnamed else _opened(inode, path)
            return None if file is None else Paged(x, file, offset + x.data_ptr() - first)
    return None


def _maps() -> Iterator[tuple[int, int, int, int, str]]:
    """From, to, place in the file, its inode and its name: all private maps of files."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not on Linux
        return
    for line in lines:
        span, rights, offset, _, inode, *name = line.split(maxsplit=5)
        first, end = (int(one, 16) for one in span.split("-"))
        if rights[3] == "p" and int(inode):
            yield first, end, int(offset, 16), int(inode), "".join(name)


def _opened(inode: int, path: str) -> int | None:
    """A descriptor of the very file that is mapped, if it is to be had still."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    if os.fstat(file).st_ino == inode:
        return file
    os.close(file)
    return None


def stretches(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A pass over all rows, some of them at a time: the first's number, and they."""
    pages = _pages(x) if x.nbytes > STRETCH else None
    size = max(1, STRETCH // max(1, x[:1].nbytes))
    for first in range(0, len(x), size):
        yield first, x[first : first + size]
        if pages is not None:
            let_go(pages)


def _pages(x: Tensor) -> tuple[int, int] | None:
    place = x.data_ptr()
    for first, end, *_ in _maps():
        if first <= place and place + x.nbytes <= end and x.is_contiguous():
            low = place // mmap.PAGESIZE * mmap.PAGESIZE
            return low, -(-(place + x.nbytes - low) // mmap.PAGESIZE) * mmap.PAGESIZE
    return None


def let_go(pages: tuple[int, int]) -> None:
    """Takes pages that nobody has written to out of this process: the file has them still."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None and hasattr(mmap, "MADV_DONTNEED"):
        advise(ctypes.c_void_p(pages[0]), ctypes.c_size_t(pages[1]), mmap.MADV_DONTNEED)


def gathered(folder: Path, shape: tuple[int, int], parts: Iterable[Tensor]) -> Tensor:
    """Float32 rows as one tensor; many of them in a file without a name, which goes with it."""
    if 4 * prod(shape) <= LARGE:
        return torch.cat(list(parts))
    with files.disk(folder):
        files.folder(folder)
        return _written(folder, shape, parts)


def _written(folder: Path, shape: tuple[int, int], parts: Iterable[Tensor]) -> Tensor:
    with tempfile.TemporaryFile(dir=folder) as file:
        for part in parts:
            file.write(part.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        array = np.memmap(file, np.float32, "c", shape=shape)
        own = os.dup(file.fileno())
    begin = array.ctypes.data
    _unnamed[begin] = own
    finalize(array, _close, begin)
    return torch.from_numpy(array)


def _close(begin: int) -> None:
    os.close(_unnamed.pop(begin))
