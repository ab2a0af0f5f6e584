"""The clients of a federation as row numbers of the table: few arrays, however many they are."""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from fedvlm.data.splits import Ints

SPLIT_FIELDS = ("train", "validation", "test", "calibration")


@dataclass(frozen=True)
class ClientSplit:
    """One client of the federation, as row numbers of the table."""

    id: str
    domain: str  # empty if its rows come from several domains, or from none that is named
    train: Ints
    validation: Ints
    test: Ints
    calibration: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # nothing else's


class ClientSplits(Mapping[str, ClientSplit]):
    """Members by id, in the order in which they came."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._domains: list[str] = []
        self._rows = array("q")  # of one member after the other, part by part
        self._ends = array("q", [0])  # of every part of every member

    def add(self, member: ClientSplit) -> None:
        self._number[member.id] = len(self._number)
        self._domains.append(member.domain)
        for part in SPLIT_FIELDS:
            self._rows.frombytes(np.asarray(getattr(member, part), np.int64).tobytes())
            self._ends.append(len(self._rows))

    def __getitem__(self, id: str) -> ClientSplit:
        number = self._number[id]
        first = number * len(SPLIT_FIELDS)
        ends = self._ends[first : first + len(SPLIT_FIELDS) + 1].tolist()
        start = ends[0]
        rows = np.array(self._rows[start : ends[-1]], np.int64)  # a copy, the caller's own
        parts = [rows[a - start : b - start] for a, b in pairwise(ends)]
        return ClientSplit(id, self._domains[number], *parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._number)

    def __len__(self) -> int:
        return len(self._number)

    def __contains__(self, id: object) -> bool:
        return id in self._number
