"""Local tensors of many clients in one file: only those that are asked for are in memory."""

import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedvlm.errors import DataError
from fedvlm.storage.files import atomic_write, explain_os_errors, make_folder
from fedvlm.tensors import Tensors, copy, count_bytes

DIGEST_BYTES = 16  # bytes of a record's digest


class ClientStateStore(Mapping[str, Tensors]):
    """Every client has two places for tensors of the same names and shapes.

    What is put goes to the place that the last mark does not name, so that a kill at any moment
    leaves what was marked as it was. The file has holes where nobody has taken part.
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
        """(clients,) which place holds what is there now; that stays until the next mark."""
        with explain_os_errors(self.path):
            os.fsync(self.file)
        self.committed = self.current.copy()
        return torch.from_numpy(self.committed.copy())

    def restore(self, committed: Tensor) -> None:
        self.committed = committed.numpy().copy()
        self.current = self.committed.copy()

    def save(self, path: Path, ids: Sequence[str]) -> Tensor:
        """What these have into a file of the record; (ids,) whose is which of it, -1 for none."""
        numbers = np.array([self.index_of[id] for id in ids], np.int64)
        places = np.where(self.current[numbers] > 0, np.cumsum(self.current[numbers] > 0) - 1, -1)
        with atomic_write(path) as draft_path, draft_path.open("wb") as file:
            for number in numbers[places >= 0].tolist():
                file.write(os.pread(self.file, self.size, self._offset(number)))
        return torch.from_numpy(places)

    def close(self) -> None:
        """The file goes with it: what is to stay is in the training's outcome."""
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
    """What `save` wrote, read client by client; who is not in it has what everyone began with."""

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
