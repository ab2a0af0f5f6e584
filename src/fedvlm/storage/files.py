"""Write files atomically, lock them, and check JSON and tensors by checksums."""

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

import tomli_w
from safetensors import SafetensorError, safe_open

from fedvlm.errors import DataError, suggest_path

if TYPE_CHECKING:  # what is JSON is read without torch
    from fedvlm.tensors import Tensors


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into errors with a remedy."""
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
    """Yield a temporary path beside a file, which replaces it as a whole if nothing failed, also after a power cut."""
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
    """Return the permissions of a folder, which its files may not exceed."""
    return stat.S_IMODE(folder_path.stat().st_mode) & 0o777


def make_folder(path: Path) -> None:
    """Create a folder and its parents, each with the permissions of the one it is in."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):  # another process was as quick
            path.mkdir(mode=_folder_mode(path.parent))


def make_private_folder(path: Path) -> None:
    """Create a folder that only its owner can enter; an existing one is left as it is."""
    with explain_os_errors(path), suppress(FileExistsError):
        make_folder(path.parent)
        path.mkdir(mode=0o700)


@contextmanager
def open_for_append(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for appending and reading, with the permissions of its folder."""
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
    """Read a regular file of limited size; FIFOs, sockets and devices are refused without opening them."""
    _require_regular(path, os.stat(path).st_mode)
    # another file may have replaced it since: open without blocking and check again
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        _require_regular(path, status.st_mode)
        data = file.read(max_bytes + 1) if status.st_size <= max_bytes else b""
    if len(data) > max_bytes or status.st_size > max_bytes:
        raise DataError(f"{path} has more than {max_bytes:,} bytes; make it smaller or leave it out")
    return data


class NotRegularFileError(DataError):
    """The path is a FIFO, a socket, a device or a folder."""


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        file_kind = SPECIAL_FILE_KINDS.get(stat.S_IFMT(mode), "a device")
        raise NotRegularFileError(f"{path} is {file_kind} and no file, and was not opened; remove it")


LOCK_ATTEMPTS, LOCK_RETRY_SECONDS = 4, 0.02  # at a lock, and seconds between: `busy` has it while it looks


@contextmanager
def exclusive_lock(lock: Path, busy_message: str) -> Iterator[None]:
    """Hold a lock for this process; another one is refused with `busy_message`. The lock ends with the process."""
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
    """Return a readable file name for a training, different for different names."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:40]
    return plain if plain == name else f"{plain}-{sha256(name.encode()).hexdigest()[:8]}"


def data_name(data: str, encoder: str) -> str:
    """Return the name of a run's data in the name of its folder."""
    kind, _, location = encoder.partition(":")
    return slug(Path(location).stem if kind == "store" else Path(data).name)


CHUNKS_PER_WRITE = 1 << 10  # of JSON that are written at once
INDEX_FILE = "index.json"  # of a folder, with the digest of every other file


class DamagedError(Exception):
    """The bytes do not match their checksum."""


def checksum(tensors: Tensors, metadata: str = "") -> str:
    """Return the checksum of names, types, shapes, bytes and metadata, whatever the order."""
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
    # One entry, because safetensors writes several in any order: the same content gives the same bytes.
    header = json.dumps({"about": text, "checksum": checksum(contiguous, text)})
    return save(contiguous, metadata={"fedvlm": header})


def decode_tensors(data: bytes) -> tuple[Tensors, Any]:
    """Return tensors and metadata; a flipped bit raises `DamagedError`. It finds accidents, not forgers."""
    from safetensors.torch import load

    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])["__metadata__"]["fedvlm"]
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"not a complete safetensors message: {error}") from error
    return tensors, verify_header(header, tensors)


def verify_header(header: str, tensors: Tensors) -> Any:
    """Return the metadata of a header after its checksum and that of the tensors have been checked."""
    try:
        fields = json.loads(header)
        metadata, expected = str(fields["about"]), fields["checksum"]
        if expected != checksum(tensors, metadata):
            raise DamagedError("its checksum does not match")
        return json.loads(metadata)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"unreadable header: {error}") from error


MAX_LINE_DEPTH = 2  # so deep has a JSON file lines; what is deeper is in one
CHECKSUM_KEY = "checksum"  # the last key of a sealed JSON object
# what a seal leaves at the end even if its key was hit: then it is no file without one
CHECKSUM_TAIL = re.compile(rb'"[^"]*": "[0-9a-f]{64}"\s*\}\s*$')


def encode_json(value: Any, indent: int | None = 1) -> bytes:
    """Encode JSON; an object gets a checksum of its text without the checksum."""
    return b"".join(_json_chunks(value, indent))


def _json_chunks(value: Any, indent: int | None) -> Iterator[bytes]:
    """Yield the encoded JSON in pieces, because that of many clients is large."""
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
    """Encode with a line for all that is MAX_LINE_DEPTH deep; Python's fast encoder has no lines."""
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
    """Decode JSON and check its checksum; an object without one is accepted."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(str(error)) from error
    if not isinstance(value, dict):
        return value
    seal = value.pop(CHECKSUM_KEY, None)
    if CHECKSUM_TAIL.search(data) if seal is None else not _matches_checksum(data, str(seal), not value, indent):
        raise DamagedError("its checksum does not match")
    return value


def _matches_checksum(data: bytes, seal: str, is_empty: bool, indent: int | None) -> bool:
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
    """Write the digests of all files of a folder, or of those named, for `fedvlm verify`."""
    names = [name for name in _list_files(folder) if not only or name.split("/")[0] in only]
    write_json(folder / INDEX_FILE, {"files": {name: file_sha256(folder / name) for name in names}})


def check_index(folder: Path) -> dict[str, str]:
    """Return the problems of a folder's files by name; files that the index does not list are ignored."""
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
    """Read tensors and metadata; a single flipped bit is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {})["fedvlm"]
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DataError(f"there is no {path}") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a complete safetensors file ({error}); delete it") from error
    try:
        return tensors, verify_header(header, tensors)
    except DamagedError as error:
        raise DataError(f"{path} is damaged: {error}; delete it and resume") from error


def to_toml(values: Mapping[str, Any]) -> str:
    """Write TOML by tomli-w; what is None is left out, because TOML has no null."""

    def without_none(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: without_none(entry) for key, entry in value.items() if entry is not None}
        return [without_none(entry) for entry in value] if isinstance(value, list | tuple) else value

    return tomli_w.dumps(without_none(values))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables by dotted names."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
