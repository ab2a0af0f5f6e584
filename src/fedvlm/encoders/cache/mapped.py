"""Rows of a memory-mapped file that are let go once they are read, so that they do not add up."""

import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.encoders.cache.table import check_sums
from fedvlm.storage.paged import LARGE


class Mapped:
    """(rows, ...) of a map: `mapped[index]` is a tensor in memory, `take` is not.

    A row is checked when it is first read, and not again by the same process.
    """

    def __init__(
        self,
        array: "np.memmap[Any, Any]",
        rows: NDArray[np.int64],
        sums: NDArray[np.uint32],
        seen: NDArray[np.bool_],
        where: str,
    ) -> None:
        self._array, self._rows = array, rows
        self._sums, self._seen, self._where = sums, seen, where  # of all rows of the array

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._rows), *self._array.shape[1:]))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Tensor:
        rows = self.take(index)._rows
        values = np.asarray(self._array)[rows]
        new = ~self._seen[rows]
        check_sums(values[new], self._sums[rows[new]], self._where)
        self._seen[rows] = True
        # The system keeps the file's pages as long as it likes; they are ours no more.
        self._array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        return torch.from_numpy(values)

    def take(self, index: Any) -> "Mapped":
        """Some of the rows, still on disk."""
        numbers = index.numpy() if isinstance(index, Tensor) else index
        taken = self._rows[numbers].reshape(-1)
        return Mapped(self._array, taken, self._sums, self._seen, self._where)


def checked(array: NDArray[Any], sums: NDArray[np.uint32], where: str) -> Tensor | Mapped:
    """A tensor over the array, checked; or for a large map of an unchanging file rows on demand."""
    if isinstance(array, np.memmap) and array.nbytes > LARGE and hasattr(mmap, "MADV_DONTNEED"):
        return Mapped(array, np.arange(len(array)), sums, np.zeros(len(array), bool), where)
    check_sums(array, sums, where)
    return torch.from_numpy(array)
