"""Local tensors of many clients in one file: only those that are asked for are in memory."""

import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedvlm.errors import DataError
from fedvlm.storage.files import disk, draft, folder
from fedvlm.tensors import Tensors, copy, count_bytes

SEAL = 16  # bytes of a record's digest


class Shelf(Mapping[str, Tensors]):
    """Every client has two places for tensors of the same names and shapes.

    What is put goes to the place that the last mark does not name, so that a kill at any moment
    leaves what was marked as it was. The file has holes where nobody has taken part.
    """

    def __init__(self, path: Path, ids: Sequence[str], like: Tensors) -> None:
        self.path, self.like = path, like
        self.number = {id: number for number, id in enumerate(sorted(ids))}
        self.size = count_bytes(like) + SEAL
        self.marked = np.zeros(len(self.number), np.int8)  # 0: nothing, else the first or second
        self.now = self.marked.copy()
        with disk(path):
            folder(path.parent)
            self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __getitem__(self, id: str) -> Tensors:
        number = self.number[id]
        if not self.now[number]:
            raise KeyError(id)
        data = os.pread(self.file, self.size, self._place(number))
        return _checked(self.path, id, data, self.like)

    def __iter__(self) -> Iterator[str]:
        return (id for id, number in self.number.items() if self.now[number])

    def __len__(self) -> int:
        return int((self.now > 0).sum())

    def put(self, many: Mapping[str, Tensors]) -> None:
        for id, given in many.items():
            number, bytes_ = self.number[id], self._body(id, given)
            self.now[number] = 2 if self.marked[number] == 1 else 1
            with disk(self.path):
                os.pwrite(self.file, bytes_ + _digest(id, bytes_), self._place(number))

    def mark(self) -> Tensor:
        """(clients,) which place holds what is there now; that stays until the next mark."""
        with disk(self.path):
            os.fsync(self.file)
        self.marked = self.now.copy()
        return torch.from_numpy(self.marked.copy())

    def back_to(self, marked: Tensor) -> None:
        self.marked = marked.numpy().copy()
        self.now = self.marked.copy()

    def save(self, path: Path, ids: Sequence[str]) -> Tensor:
        """What these have into a file of the record; (ids,) whose is which of it, -1 for none."""
        numbers = np.array([self.number[id] for id in ids], np.int64)
        places = np.where(self.now[numbers] > 0, np.cumsum(self.now[numbers] > 0) - 1, -1)
        with draft(path) as beside, beside.open("wb") as file:
            for number in numbers[places >= 0].tolist():
                file.write(os.pread(self.file, self.size, self._place(number)))
        return torch.from_numpy(places)

    def close(self) -> None:
        """The file goes with it: what is to stay is in the training's outcome."""
        os.close(self.file)
        self.path.unlink(missing_ok=True)

    def _place(self, number: int) -> int:
        return (2 * number + int(self.now[number]) - 1) * self.size

    def _body(self, id: str, given: Tensors) -> bytes:
        def schema(one: Tensors) -> dict[str, tuple[torch.dtype, torch.Size]]:
            return {key: (value.dtype, value.shape) for key, value in one.items()}

        if schema(given) != schema(self.like):
            raise DataError(
                f"the local tensors of {id} are {schema(given)}, not {schema(self.like)} as init "
                "gives them; a method of so many clients keeps their names and shapes"
            )
        arrays = (given[key].detach().contiguous().reshape(-1) for key in self.like)
        return b"".join(one.view(torch.uint8).numpy().tobytes() for one in arrays)


class Saved(Mapping[str, Tensors]):
    """What `save` wrote, read client by client; who is not in it has what everyone began with."""

    def __init__(self, path: Path, ids: Sequence[str], fresh: Tensors, places: Tensor) -> None:
        self.path, self.fresh = path, fresh
        self.place = dict(zip(ids, places.tolist(), strict=True))

    def __getitem__(self, id: str) -> Tensors:
        place, size = self.place[id], count_bytes(self.fresh) + SEAL
        if place < 0:
            return copy(self.fresh)
        try:
            with self.path.open("rb") as file:
                file.seek(place * size)
                return _checked(self.path, id, file.read(size), self.fresh)
        except FileNotFoundError as error:
            raise DataError(f"there is no {self.path}; run again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.place)

    def __len__(self) -> int:
        return len(self.place)


def _checked(path: Path, id: str, data: bytes, like: Tensors) -> Tensors:
    body = bytearray(data[:-SEAL])
    if len(data) != count_bytes(like) + SEAL or _digest(id, body) != data[-SEAL:]:
        raise DataError(f"{path} is damaged: the tensors of {id}; delete it and run again")
    out, first = {}, 0
    for key, one in like.items():
        held = torch.frombuffer(body, dtype=one.dtype, count=one.numel(), offset=first)
        out[key] = held.reshape(one.shape)
        first += one.numel() * one.element_size()
    return out


def _digest(id: str, body: bytes | bytearray) -> bytes:
    whose = blake2b(id.encode(), digest_size=32).digest()
    return blake2b(body, digest_size=SEAL, key=whose).digest()
