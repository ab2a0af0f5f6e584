"""The images of a data set by content, and which of them cannot be read."""

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from fedvlm.data.table import Dataset
from fedvlm.errors import DataError
from fedvlm.storage.files import NotRegularFileError

MAX_UNREADABLE_FRACTION = 0.05  # share of the rows above which the data is to blame and not an image


class DatasetImages:
    """Rows are found by the digest of their bytes; an image that is there twice is read once."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.digests: list[bytes] = []
        self._sizes: dict[bytes, int] = {}  # digest -> bytes
        self._unread: dict[int, str] = {}  # row -> reason
        self._undecoded: dict[bytes, str] = {}  # digest -> reason
        none = 0
        for row in range(len(dataset.source)):
            try:
                data = dataset.source.read(row)
            except (OSError, DataError) as error:
                self.digests.append(b"")
                self._unread[row] = str(error) or type(error).__name__
                none += isinstance(error, NotRegularFileError)  # skipped by name, but no image that is unsound
                continue
            self.digests.append(sha256(data).digest())
            self._sizes[self.digests[-1]] = len(data)
        if not self.digests:
            raise DataError(f"{dataset.name} has no images; look at its directory and filters")
        self._times = Counter(self.digests)
        self._lost, self._count = len(self._unread) - none, len(self.digests) - none
        self.first: dict[bytes, int] = {}  # digest -> the first row that has it
        for row, digest in enumerate(self.digests):
            if digest:
                self.first.setdefault(digest, row)
        self._stop_if_many()

    def size(self, digests: Iterable[bytes]) -> int:
        return sum(self._sizes[digest] for digest in digests)

    def name(self, digest: bytes) -> str:
        return self._dataset.source.name(self.first[digest])

    def read(self, digest: bytes) -> bytes:
        try:
            return self._dataset.source.read(self.first[digest])
        except (OSError, DataError):  # it could be read a moment ago: its digest will not fit
            return b""

    def mark_unreadable(self, digest: bytes, reason: str) -> None:
        self._undecoded[digest] = reason
        self._lost += self._times[digest]
        self._stop_if_many()

    def skipped(self) -> list[tuple[str, str]]:
        reasons = (
            (row, self._unread.get(row) or self._undecoded.get(digest)) for row, digest in enumerate(self.digests)
        )
        return [(self._dataset.source.name(row), reason) for row, reason in reasons if reason]

    def _stop_if_many(self) -> None:
        if self._lost > MAX_UNREADABLE_FRACTION * self._count:
            some = "; ".join(f"{name}: {reason}" for name, reason in self.skipped()[:3])
            raise DataError(
                f"at least {self._lost} of the {self._count} images of "
                f"{self._dataset.name} cannot be read, more than {MAX_UNREADABLE_FRACTION:.0%}; "
                f"replace or remove them. The first: {some}"
            )

    def readable_rows(self) -> NDArray[np.int64]:
        """The rows that can be read, if they still hold every class."""
        fine = [bool(d) and d not in self._undecoded for d in self.digests]
        rows = np.flatnonzero(np.array(fine))
        lost_classes = np.setdiff1d(self._dataset.labels, self._dataset.labels[rows])
        if lost_classes.size:
            raise DataError(
                f"no image of class {self._dataset.classes[int(lost_classes[0])]!r} of "
                f"{self._dataset.name} can be read; replace the images or remove the class"
            )
        return rows
