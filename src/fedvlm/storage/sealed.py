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

from fedvlm.errors import DataError, suggest_path
from fedvlm.storage.files import atomic_write, write_file

if TYPE_CHECKING:  # what is JSON is read without torch
    from fedvlm.tensors import Tensors

CHUNKS_PER_WRITE = 1 << 10  # of JSON that are written at once
INDEX_FILE = "index.json"  # of a folder, with the digest of every other file


class DamagedError(Exception):
    """Bytes that are not, or no longer, what was sealed."""


def checksum(tensors: Tensors, metadata: str = "") -> str:
    """Of names, types, shapes, every byte, and what is said about them, whatever the order."""
    import torch

    digest = sha256(metadata.encode())
    for key in sorted(tensors):
        value = tensors[key].detach().contiguous()
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def encode_tensors(tensors: Tensors, metadata: Mapping[str, Any]) -> bytes:
    from safetensors.torch import save

    contiguous: Tensors = {}
    storages: set[int] = set()
    for key, value in tensors.items():
        tensor = value.detach().contiguous()
        address = tensor.untyped_storage().data_ptr()
        # safetensors refuses two tensors in one place, and a part would bring all of its place
        is_unshared = address not in storages and tensor.untyped_storage().nbytes() == tensor.nbytes
        contiguous[key] = tensor if is_unshared else tensor.clone()
        storages.add(address)
    text = json.dumps(metadata)
    # One note, because safetensors writes several in any order: the same content, the same bytes.
    header = json.dumps({"about": text, "checksum": checksum(contiguous, text)})
    return save(contiguous, metadata={"fedvlm": header})


def decode_tensors(data: bytes) -> tuple[Tensors, Any]:
    """The tensors and what was said about them; a flipped bit or a missing end is `Damaged`.

    A checksum finds accidents, not forgers: who may send at all is the transport's to say.
    """
    from safetensors.torch import load

    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])["__metadata__"]["fedvlm"]
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"no whole safetensors message: {error}") from error
    return tensors, verify_header(header, tensors)


def verify_header(header: str, tensors: Tensors) -> Any:
    """What the note says, once it and the tensors have passed its checksum."""
    try:
        fields = json.loads(header)
        metadata, expected = str(fields["about"]), fields["checksum"]
        if expected != checksum(tensors, metadata):
            raise DamagedError("its checksum does not fit")
        return json.loads(metadata)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"no readable note: {error}") from error


MAX_LINE_DEPTH = 2  # so deep has a JSON file lines; what is deeper is in one
CHECKSUM_KEY = "checksum"  # the last key of a sealed JSON object
# what a seal leaves at the end even if its key was hit: then it is no file without one
CHECKSUM_TAIL = re.compile(rb'"[^"]*": "[0-9a-f]{64}"\s*\}\s*$')


def encode_json(value: Any, indent: int | None = 1) -> bytes:
    """As JSON, an object with a checksum over the text that it has without one."""
    return b"".join(_json_chunks(value, indent))


def _json_chunks(value: Any, indent: int | None) -> Iterator[bytes]:
    """The same in pieces: of many clients the whole is a multiple of what it tells."""
    encoder = json.JSONEncoder(ensure_ascii=False)
    if not isinstance(value, Mapping):
        yield encoder.encode(value).encode() + b"\n"
        return
    digest, end = sha256(), b"}" if indent is None or not value else b"\n}"
    chunks = iter([encoder.encode(value)]) if indent is None else _indented_chunks(value, indent)
    pending = b""
    while batch := "".join(islice(chunks, CHUNKS_PER_WRITE)):
        text = pending + batch.encode()
        pending = text[-len(end) :]
        digest.update(text[: -len(end)])
        yield text[: -len(end)]
    digest.update(pending)
    checksum_entry = f'"{CHECKSUM_KEY}": "{digest.hexdigest()}"'.encode()
    separator, newline = (b", ", b"") if indent is None else (b",\n" + b" " * indent, b"\n")
    if not value:
        separator = separator[1:] if newline else b""
    yield separator + checksum_entry + newline + b"}\n"


def _indented_chunks(value: Any, indent: int, level: int = 1) -> Iterator[str]:
    """As JSON with a line for all that is `LINES` deep, such as a client: Python's encoder in C,
    ten times as fast as its other one, has no lines."""
    encode, is_mapping = json.JSONEncoder(ensure_ascii=False).encode, isinstance(value, Mapping)
    yield "{" if is_mapping else "["
    for place, key in enumerate(value):
        element, name = (value[key], encode({key: 0})[1:-2]) if is_mapping else (key, "")
        yield ("," if place else "") + "\n" + " " * indent * level + name
        if isinstance(element, dict | list) and element and level < MAX_LINE_DEPTH:
            yield from _indented_chunks(element, indent, level + 1)
        else:
            yield encode(element)
    yield ("\n" + " " * indent * (level - 1) if value else "") + ("}" if is_mapping else "]")


def decode_json(data: bytes, indent: int | None = 1) -> Any:
    """What was sealed; objects written before there were seals are taken as they are."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(str(error)) from error
    if not isinstance(value, dict):
        return value
    recorded_checksum = value.pop(CHECKSUM_KEY, None)
    if (
        CHECKSUM_TAIL.search(data)
        if recorded_checksum is None
        else not _matches_checksum(data, str(recorded_checksum), not value, indent)
    ):
        raise DamagedError("its checksum does not fit")
    return value


def _matches_checksum(data: bytes, seal: str, is_empty: bool, indent: int | None) -> bool:
    """Whether the text is what the seal at its end was taken of."""
    if is_empty:
        return data == encode_json({}, indent)
    line, end = (b", ", b"}") if indent is None else (b",\n" + b" " * indent, b"\n}")
    tail = line + f'"{CHECKSUM_KEY}": "{seal}"'.encode() + end + b"\n"
    digest = sha256(memoryview(data)[: -len(tail)])
    digest.update(end)
    return data.endswith(tail) and digest.hexdigest() == seal


def write_json(path: Path, value: Any) -> None:
    with atomic_write(path) as draft_path, draft_path.open("wb") as file:
        file.writelines(_json_chunks(value, 1))


def read_json(path: Path) -> Any:
    try:
        return decode_json(path.read_bytes())
    except FileNotFoundError as error:
        folder = path.parent
        suggestion = "" if folder.is_dir() else suggest_path(folder)
        raise DataError(f"there is no {path}; {suggestion or f'is {folder} a run directory?'}") from error
    except DamagedError as error:
        raise DataError(f"{path} is damaged ({error}); delete it, or the run, and run again") from error


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def write_index(folder: Path, only: Collection[str] = ()) -> None:
    """The digests of all files of a folder, or of what is named, for `fedvlm verify`."""
    names = [name for name in _list_files(folder) if not only or name.split("/")[0] in only]
    write_json(folder / INDEX_FILE, {"files": {name: file_sha256(folder / name) for name in names}})


def check_index(folder: Path) -> dict[str, str]:
    """What is wrong with the files of a folder, by name; later files are not looked at."""
    index = read_json(folder / INDEX_FILE)["files"]
    existing = set(_list_files(folder))
    return {
        name: "is missing" if name not in existing else "is not what was written"
        for name, digest in index.items()
        if name not in existing or file_sha256(folder / name) != digest
    }


def _list_files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    return sorted(str(path.relative_to(folder)) for path in paths if path.name != INDEX_FILE)


def write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, Any]) -> None:
    write_file(path, encode_tensors(tensors, metadata))


def read_tensors(path: Path) -> tuple[Tensors, Any]:
    """The tensors and what was said about them; a single flipped bit is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {})["fedvlm"]
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DataError(f"there is no {path}") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a whole safetensors file ({error}); delete it") from error
    try:
        return tensors, verify_header(header, tensors)
    except DamagedError as error:
        raise DataError(f"{path} is damaged: {error}; delete it and resume") from error
