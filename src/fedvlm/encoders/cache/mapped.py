"""Rows of a memory-mapped file that are let go once they are read, so that they do not add up."""

import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGE = 256 << 20  # bytes from which rows are read one minibatch at a time


class Mapped:
    """(rows, ...) of a map: `mapped[index]` is a tensor in memory, `take` is not."""

    def __init__(self, array: "np.memmap[Any, Any]", rows: NDArray[np.int64]) -> None:
        self._array, self._rows = array, rows

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._rows), *self._array.shape[1:]))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Tensor:
        found = torch.from_numpy(np.asarray(self._array)[self.take(index)._rows])
        # The system keeps the file's pages as long as it likes; they are ours no more.
        self._array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        return found

    def take(self, index: Any) -> "Mapped":
        """Some of the rows, still on disk."""
        numbers = index.numpy() if isinstance(index, Tensor) else index
        return Mapped(self._array, self._rows[numbers].reshape(-1))


def opened(array: NDArray[Any]) -> Tensor | Mapped:
    """A tensor over the array, or for a large map of an unchanging file its rows on demand."""
    if isinstance(array, np.memmap) and array.nbytes > LARGE and hasattr(mmap, "MADV_DONTNEED"):
        return Mapped(array, np.arange(len(array)))
    return torch.from_numpy(array)
