"""Files appear whole or not at all: written beside their place, synced, and renamed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from itertools import islice
from pathlib import Path
from time import sleep
from typing import IO, TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from fedvlm.errors import DataError, suggest_path

if TYPE_CHECKING:  # what is JSON is read without torch
    from fedvlm.tensors import Tensors
from json import dumps


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turns what a disk can refuse into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"the disk is full at {path}; free some space and resume: "
                "what was finished is still there, and nothing is half-written"
            ) from error
        if isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
            raise DataError(f"cannot write {path} ({error.strerror}); choose another place") from error
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A place beside a file to write it to; it takes the file's place when all went well.

    A reader finds the old file or the new one, also after a kill or a power cut.
    """
    draft_path = path.with_name(f".{path.name}.{os.getpid()}")
    with explain_os_errors(path):
        make_folder(path.parent)
        try:
            yield draft_path
            draft_path.chmod(stat.S_IMODE(draft_path.stat().st_mode) & _folder_mode(path.parent))
            with open(draft_path, "rb") as file:
                os.fsync(file.fileno())
            os.replace(draft_path, path)
        finally:
            draft_path.unlink(missing_ok=True)


def _folder_mode(folder_path: Path) -> int:
    """What others may do in a folder, they may at most do with what is in it."""
    return stat.S_IMODE(folder_path.stat().st_mode) & 0o777


def make_folder(path: Path) -> None:
    """A folder, and those above it, each as private as the one it is in."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):  # another process was as quick
            path.mkdir(mode=_folder_mode(path.parent))


def make_private_folder(path: Path) -> None:
    """A folder that only its owner can enter; one that is there stays as its owner made it."""
    with explain_os_errors(path), suppress(FileExistsError):
        make_folder(path.parent)
        path.mkdir(mode=0o700)


@contextmanager
def open_for_append(path: Path) -> Iterator[IO[bytes]]:
    """A file that grows, to be read as well; as private as its folder."""
    with explain_os_errors(path):
        make_folder(path.parent)
        mode = _folder_mode(path.parent) & 0o666
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "a+b") as file:
            yield file


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with atomic_write(path) as draft_path, os.fdopen(os.open(draft_path, flags, mode), "wb") as file:
        file.write(data)


MAX_IMAGE_BYTES = 256 << 20  # bytes of one image's file: above any the pixel limit lets through
SPECIAL_FILE_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


def read_regular(path: Path, max_bytes: int = MAX_IMAGE_BYTES) -> bytes:
    """A file of at most so many bytes; what could wait for ever or act is told and not opened."""
    _require_regular(path, os.stat(path).st_mode)
    # another may have taken its place since: opening waits for nobody, and it is looked at again
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        _require_regular(path, status.st_mode)
        data = file.read(max_bytes + 1) if status.st_size <= max_bytes else b""
    if len(data) > max_bytes or status.st_size > max_bytes:
        raise DataError(f"{path} has more than {max_bytes:,} bytes; make it smaller or leave it out")
    return data


class NotRegularFileError(DataError):
    """A FIFO, a socket, a device: nothing that was ever an image."""


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        file_kind = SPECIAL_FILE_KINDS.get(stat.S_IFMT(mode), "a device")
        raise NotRegularFileError(f"{path} is {file_kind} and no file, and was not opened; remove it")


LOCK_ATTEMPTS, LOCK_RETRY_SECONDS = 4, 0.02  # at a lock, and seconds between: `busy` has it while it looks


@contextmanager
def exclusive_lock(lock: Path, busy_message: str) -> Iterator[None]:
    """One process at a time; `busy` is what another is told. The lock goes with the process."""
    with open_for_append(lock) as file:
        for attempts_left in reversed(range(LOCK_ATTEMPTS)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not attempts_left:
                    raise DataError(busy_message) from error
                sleep(LOCK_RETRY_SECONDS)
        try:
            yield
        finally:  # also of a child process that has the file open still
            fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(lock: Path) -> bool:
    """Whether a process holds this lock now."""
    if not lock.exists():
        return False
    with open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def slug(name: str) -> str:
    """A file name for a training: readable, and different for different names."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:40]
    return plain if plain == name else f"{plain}-{sha256(name.encode()).hexdigest()[:8]}"


def data_name(data: str, encoder: str) -> str:
    """What the rows of a run are called in the name of a folder."""
    kind, _, location = encoder.partition(":")
    return slug(Path(location).stem if kind == "store" else Path(data).name)


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


BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(values: Mapping[str, Any], prefix: str = "") -> str:
    """A table with the tables and lists of tables in it; strings as JSON, which TOML reads alike.

    What is None is left out: TOML has no word for it.
    """
    head, rest = "", ""
    for key, value in values.items():
        name = key if BARE_KEY.fullmatch(key) else dumps(key, ensure_ascii=False)
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            rest += f"\n[{path}]\n{to_toml(value, path)}"
        elif isinstance(value, list) and value and all(isinstance(table, Mapping) for table in value):
            rest += "".join(f"\n[[{path}]]\n{to_toml(table, path)}" for table in value)
        elif value is not None:
            head += f"{name} = {dumps(value, ensure_ascii=False)}\n"
    return head + rest


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted names."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
