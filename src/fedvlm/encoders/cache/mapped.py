"""Rows of a memory-mapped file that are let go once they are read, so that they do not add up."""

import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.encoders.cache.table import check_sums
from fedvlm.storage.large_tensors import MAX_IN_MEMORY_BYTES


class MappedRows:
    """(rows, ...) of a map: `mapped[index]` is a tensor in memory, `take` is not.

    A row is checked when it is first read, and not again by the same process.
    """

    def __init__(
        self,
        array: "np.memmap[Any, Any]",
        rows: NDArray[np.int64],
        sums: NDArray[np.uint32],
        verified: NDArray[np.bool_],
        location: str,
    ) -> None:
        self._array, self._rows = array, rows
        self._sums, self._verified, self._location = sums, verified, location  # of all rows of the array

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._rows), *self._array.shape[1:]))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Tensor:
        rows = self.take(index)._rows
        values = np.asarray(self._array)[rows]
        new = ~self._verified[rows]
        check_sums(values[new], self._sums[rows[new]], self._location)
        self._verified[rows] = True
        # The system keeps the file's pages as long as it likes; they are ours no more.
        self._array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        return torch.from_numpy(values)

    def take(self, index: Any) -> "MappedRows":
        """Some of the rows, still on disk."""
        numbers = index.numpy() if isinstance(index, Tensor) else index
        selected = self._rows[numbers].reshape(-1)
        return MappedRows(self._array, selected, self._sums, self._verified, self._location)


def check_and_map(array: NDArray[Any], sums: NDArray[np.uint32], location: str) -> Tensor | MappedRows:
    """A tensor over the array, checked; or for a large map of an unchanging file rows on demand."""
    if isinstance(array, np.memmap) and array.nbytes > MAX_IN_MEMORY_BYTES and hasattr(mmap, "MADV_DONTNEED"):
        return MappedRows(array, np.arange(len(array)), sums, np.zeros(len(array), bool), location)
    check_sums(array, sums, location)
    return torch.from_numpy(array)
