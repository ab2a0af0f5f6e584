"""Tensors as bytes that show damage: safetensors, with a checksum over all that is said."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from hashlib import file_digest, sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from fedvlm.errors import DataError, nearest
from fedvlm.storage.files import draft, write

if TYPE_CHECKING:  # what is JSON is read without torch
    from fedvlm.tensors import Tensors

PIECES = 1 << 10  # of JSON that are written at once
INDEX = "index.json"  # of a folder, with the digest of every other file


class Damaged(Exception):
    """Bytes that are not, or no longer, what was sealed."""


def checksum(tensors: Tensors, about: str = "") -> str:
    """Of names, types, shapes, every byte, and what is said about them, whatever the order."""
    import torch

    total = sha256(about.encode())
    for key in sorted(tensors):
        value = tensors[key].detach().contiguous()
        total.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def seal(tensors: Tensors, about: Mapping[str, Any]) -> bytes:
    from safetensors.torch import save

    whole: Tensors = {}
    seen: set[int] = set()
    for key, value in tensors.items():
        one = value.detach().contiguous()
        place = one.untyped_storage().data_ptr()
        # safetensors refuses two tensors in one place, and a part would bring all of its place
        alone = place not in seen and one.untyped_storage().nbytes() == one.nbytes
        whole[key] = one if alone else one.clone()
        seen.add(place)
    text = json.dumps(about)
    # One note, because safetensors writes several in any order: the same content, the same bytes.
    note = json.dumps({"about": text, "checksum": checksum(whole, text)})
    return save(whole, metadata={"fedvlm": note})


def unseal(data: bytes) -> tuple[Tensors, Any]:
    """The tensors and what was said about them; a flipped bit or a missing end is `Damaged`.

    A checksum finds accidents, not forgers: who may send at all is the transport's to say.
    """
    from safetensors.torch import load

    try:
        length = int.from_bytes(data[:8], "little")
        note = json.loads(data[8 : 8 + length])["__metadata__"]["fedvlm"]
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"no whole safetensors message: {error}") from error
    return tensors, unsealed(note, tensors)


def unsealed(note: str, tensors: Tensors) -> Any:
    """What the note says, once it and the tensors have passed its checksum."""
    try:
        seal = json.loads(note)
        about, wanted = str(seal["about"]), seal["checksum"]
        if wanted != checksum(tensors, about):
            raise Damaged("its checksum does not fit")
        return json.loads(about)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"no readable note: {error}") from error


LINES = 2  # so deep has a JSON file lines; what is deeper is in one
SEAL = "checksum"  # the last key of a sealed JSON object
# what a seal leaves at the end even if its key was hit: then it is no file without one
TAIL = re.compile(rb'"[^"]*": "[0-9a-f]{64}"\s*\}\s*$')


def seal_json(value: Any, indent: int | None = 1) -> bytes:
    """As JSON, an object with a checksum over the text that it has without one."""
    return b"".join(_sealed(value, indent))


def _sealed(value: Any, indent: int | None) -> Iterator[bytes]:
    """The same in pieces: of many clients the whole is a multiple of what it tells."""
    encoder = json.JSONEncoder(ensure_ascii=False)
    if not isinstance(value, Mapping):
        yield encoder.encode(value).encode() + b"\n"
        return
    total, end = sha256(), b"}" if indent is None or not value else b"\n}"
    pieces = iter([encoder.encode(value)]) if indent is None else _in_lines(value, indent)
    left = b""
    while some := "".join(islice(pieces, PIECES)):
        text = left + some.encode()
        left = text[-len(end) :]
        total.update(text[: -len(end)])
        yield text[: -len(end)]
    total.update(left)
    seal = f'"{SEAL}": "{total.hexdigest()}"'.encode()
    between, before = (b", ", b"") if indent is None else (b",\n" + b" " * indent, b"\n")
    if not value:
        between = between[1:] if before else b""
    yield between + seal + before + b"}\n"


def _in_lines(value: Any, indent: int, level: int = 1) -> Iterator[str]:
    """As JSON with a line for all that is `LINES` deep, such as a client: Python's encoder in C,
    ten times as fast as its other one, has no lines."""
    encode, named = json.JSONEncoder(ensure_ascii=False).encode, isinstance(value, Mapping)
    yield "{" if named else "["
    for place, key in enumerate(value):
        one, name = (value[key], encode({key: 0})[1:-2]) if named else (key, "")
        yield ("," if place else "") + "\n" + " " * indent * level + name
        if isinstance(one, dict | list) and one and level < LINES:
            yield from _in_lines(one, indent, level + 1)
        else:
            yield encode(one)
    yield ("\n" + " " * indent * (level - 1) if value else "") + ("}" if named else "]")


def unseal_json(data: bytes, indent: int | None = 1) -> Any:
    """What was sealed; objects written before there were seals are taken as they are."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(str(error)) from error
    if not isinstance(value, dict):
        return value
    sealed = value.pop(SEAL, None)
    if TAIL.search(data) if sealed is None else not _whole(data, str(sealed), not value, indent):
        raise Damaged("its checksum does not fit")
    return value


def _whole(data: bytes, seal: str, bare: bool, indent: int | None) -> bool:
    """Whether the text is what the seal at its end was taken of."""
    if bare:
        return data == seal_json({}, indent)
    line, end = (b", ", b"}") if indent is None else (b",\n" + b" " * indent, b"\n}")
    tail = line + f'"{SEAL}": "{seal}"'.encode() + end + b"\n"
    total = sha256(memoryview(data)[: -len(tail)])
    total.update(end)
    return data.endswith(tail) and total.hexdigest() == seal


def write_json(path: Path, value: Any) -> None:
    with draft(path) as beside, beside.open("wb") as file:
        file.writelines(_sealed(value, 1))


def read_json(path: Path) -> Any:
    try:
        return unseal_json(path.read_bytes())
    except FileNotFoundError as error:
        folder = path.parent
        meant = "" if folder.is_dir() else nearest(folder)
        raise DataError(
            f"there is no {path}; {meant or f'is {folder} a run directory?'}"
        ) from error
    except Damaged as error:
        raise DataError(
            f"{path} is damaged ({error}); delete it, or the run, and run again"
        ) from error


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def write_index(folder: Path, only: Collection[str] = ()) -> None:
    """The digests of all files of a folder, or of what is named, for `fedvlm verify`."""
    names = [one for one in _in(folder) if not only or one.split("/")[0] in only]
    write_json(folder / INDEX, {"files": {name: digest_of(folder / name) for name in names}})


def check_index(folder: Path) -> dict[str, str]:
    """What is wrong with the files of a folder, by name; later files are not looked at."""
    index = read_json(folder / INDEX)["files"]
    there = set(_in(folder))
    return {
        name: "is missing" if name not in there else "is not what was written"
        for name, digest in index.items()
        if name not in there or digest_of(folder / name) != digest
    }


def _in(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    return sorted(str(path.relative_to(folder)) for path in found if path.name != INDEX)


def write_tensors(path: Path, tensors: Tensors, about: Mapping[str, Any]) -> None:
    write(path, seal(tensors, about))


def read_tensors(path: Path) -> tuple[Tensors, Any]:
    """The tensors and what was said about them; a single flipped bit is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            note = (file.metadata() or {})["fedvlm"]
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DataError(f"there is no {path}") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a whole safetensors file ({error}); delete it") from error
    try:
        return tensors, unsealed(note, tensors)
    except Damaged as error:
        raise DataError(f"{path} is damaged: {error}; delete it and resume") from error
