"""Embeddings computed before, in one file: no images, no encoder, the same runs.

Arrays, in .npz or .safetensors (strings then in a .json of the same name beside it):
x or features, y or labels, and optionally classes, domains, clients, splits, groups (what stays in
one part: a patient), paths, content, text, text_classes, patches, scale; or one x and y per split
as train_x, train_y, val_x, ..., test_y.
A .csv or .parquet has a line per image instead: see fedvlm/encoders/tables.py.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlm.data.table import Digests, EmbeddedTable, anonymise_groups
from fedvlm.encoders.columns import (
    PER_SAMPLE_KEYS,
    Columns,
    join_splits,
    normalise_rows,
    read_labels,
    read_patches,
    read_text,
    string_column,
)
from fedvlm.encoders.interface import Vectors
from fedvlm.encoders.tables import ALIASES, TABLE_SUFFIXES, read_table
from fedvlm.errors import DataError, EncoderError, suggest_path, unknown_name
from fedvlm.machine import free_memory
from fedvlm.storage.files import DamagedError, atomic_write, decode_json, encode_json, write_file
from fedvlm.storage.large_tensors import iterate_chunks

STORE_SUFFIXES = (".npz", ".safetensors", *TABLE_SUFFIXES)
MIN_UNPACKED_BYTES = 64_000_000  # bytes that any .npz may unpack to
MAX_COMPRESSION_RATIO = 100  # and for each of its own bytes: embeddings hardly shrink, zeros shrink a thousandfold


class Store:
    """An encoder that has its rows already; `embedded` is what a run takes."""

    preprocess = None

    def __init__(self, path: str | Path, *, classes: Sequence[str] | None = None) -> None:
        self.name = f"store:{path}"
        self.embedded = open_store(path, classes)
        self.dim: int = self.embedded.x.shape[1]
        self.scale = self.embedded.scale
        has = {"text": self.embedded.text, "patches": self.embedded.patches}
        self.offers = frozenset({"image"} | {key for key in has if has[key] is not None})
        self.identity = {"kind": "store", "rows": self.embedded.fingerprint}

    def embed(self, batch: Sequence[Any], patches: bool) -> Vectors:
        raise EncoderError(
            f"{self.name} has only its own rows and no weights; "
            "use it without a data set, or name an encoder that can see"
        )

    def embed_text(self, sentences: Sequence[str]) -> Tensor:
        raise EncoderError(f"{self.name} has no text tower; use its own text vectors")


def open_store(path: str | Path, classes: Sequence[str] | None = None) -> EmbeddedTable:
    """The rows of a store, checked and of unit norm; of some classes only, if they are named."""
    file = find_store(Path(path).expanduser())
    columns, x, digest = read_columns(file)
    rows = x.shape[0]
    for key in PER_SAMPLE_KEYS:
        if key in columns and len(columns[key]) != rows:
            raise DataError(f"{file}: {key} has {len(columns[key])} rows and x has {rows}")
    names, labels = read_labels(file, columns, rows)
    domains = columns.get("domains")
    if domains is None and "paths" in columns:
        parts = [str(cell).split("/") for cell in columns["paths"]]
        domains = [part[-3] if len(part) > 2 else "" for part in parts]
    content = columns.get("content")
    if content is None:
        content = row_digests(x)
    unit = normalise_rows(file, "x", x, columns.get("paths"))
    embedded = EmbeddedTable(
        name=str(columns.get("name", file.stem)),
        classes=names,
        x=unit,
        labels=labels,
        domains=string_column(domains, rows),
        clients=string_column(columns.get("clients"), rows),
        splits=string_column(columns.get("splits"), rows),
        groups=anonymise_groups(string_column(columns["groups"], rows).tolist()) if "groups" in columns else None,
        content=content if isinstance(content, Digests) else [str(cell) for cell in content],
        scale=float(columns.get("scale", 100.0)),
        text=None,
        patches=read_patches(file, columns.get("patches"), unit.shape[1]),
        encoder=str(columns.get("encoder", f"store {digest[:16]}")),
        fingerprint=str(columns.get("fingerprint", digest)),
    )
    return select_classes(file, embedded, read_text(file, columns, names, unit.shape[1]), classes)


def read_columns(file: Path) -> tuple[Columns, Tensor, str]:
    """The columns of a file under the names of a store, its embeddings, and its digest."""
    columns, digest = read_file(file)
    columns = join_splits(file, {ALIASES.get(key, key): value for key, value in columns.items()})
    if "x" not in columns:
        raise DataError(f"{file} has no embeddings; call the array x or features")
    x = torch.from_numpy(columns["x"]) if isinstance(columns["x"], np.ndarray) else columns["x"]
    if x.ndim != 2 or not x.is_floating_point() or 0 in x.shape:
        raise DataError(f"{file}: x is {x.dtype} of {tuple(x.shape)}; it takes (rows, dim) floats")
    return columns, x, digest


def read_unlabelled(file: Path) -> tuple[list[str], Tensor]:
    """What each row of a store is called, its path or its number, and the embeddings."""
    columns, x, _ = read_columns(file)
    paths = columns.get("paths")
    names = [f"{file}[{row}]" for row in range(len(x))] if paths is None else map(str, paths)
    return list(names), x


def row_digests(x: Tensor) -> Digests:
    """Of every row's own bytes."""
    out = bytearray(32 * len(x))
    for first, part in iterate_chunks(x):
        for number, row in enumerate(part.numpy(), first):
            out[32 * number : 32 * number + 32] = sha256(row.data).digest()
    return Digests(out)


def find_store(path: Path) -> Path:
    if path.is_dir():
        files = sorted([*path.glob("*.npz"), *path.glob("*.safetensors")])
        if len(files) != 1:
            raise DataError(f"{path} holds {len(files)} stores; name one .npz or .safetensors file in it")
        return files[0]
    if not path.is_file():
        raise DataError(f"there is no store {path}; {suggest_path(path)}give a .npz, .safetensors, .csv or .parquet")
    if path.suffix not in STORE_SUFFIXES:
        raise DataError(f"{path} is not a store; it takes a .npz, .safetensors, .csv or .parquet file")
    return path


def read_file(file: Path) -> tuple[Columns, str]:
    """All columns as they are stored, and the digest of the file (and of its strings)."""
    with file.open("rb") as stream:
        digest = file_digest(stream, "sha256").hexdigest()
    if file.suffix in TABLE_SUFFIXES:
        return read_table(file), digest
    try:
        if file.suffix == ".npz":
            check_size(file)
            with np.load(file, allow_pickle=False) as archive:
                return {key: archive[key] for key in archive.files}, digest
        from safetensors import safe_open

        with safe_open(file, "pt") as opened:
            columns: Columns = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        # numpy has no bfloat16
        columns = {k: v.float() if v.dtype == torch.bfloat16 else v for k, v in columns.items()}
        sidecar = file.with_suffix(".json")
        if sidecar.is_file():
            text = sidecar.read_bytes()
            columns |= decode_json(text, None)
            if columns.get("sha256", digest) != digest:
                raise DataError(f"{file} is damaged or not the one {sidecar.name} was written for")
            digest = sha256(digest.encode() + text).hexdigest()
        return columns, digest
    except DataError:
        raise
    except DamagedError as error:
        raise DataError(f"{file.with_suffix('.json')} is damaged ({error}); save again") from error
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        objects = "; save strings as such, by y.astype(str)" if "pickle" in str(error) else ""
        raise DataError(f"{file} cannot be read ({error}){objects or '; write it again'}") from error
    except Exception as error:  # safetensors has an exception of its own for a broken header
        if type(error).__name__ != "SafetensorError":
            raise
        raise DataError(f"{file} cannot be read ({error}); write it again") from error


def check_size(file: Path) -> None:
    """Refuses an archive whose arrays would fill the memory, before any is unpacked."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    size = sum(member.file_size for member in members)
    max_bytes = MIN_UNPACKED_BYTES + MAX_COMPRESSION_RATIO * file.stat().st_size
    free = free_memory()
    if size > max_bytes or (free is not None and size > free):
        limit = f"{max_bytes:,} for a file of its size" if size > max_bytes else f"{free:,} of free memory"
        raise DataError(
            f"{file} would unpack to {size:,} bytes, more than {limit}; save it uncompressed, as "
            ".safetensors, or in parts"
        )
    if any(m.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for m in members):
        raise DataError(f"{file} is not packed as numpy does; write it with numpy.savez")


def select_classes(
    file: Path, table: EmbeddedTable, text: dict[str, Tensor], classes: Sequence[str] | None
) -> EmbeddedTable:
    """The rows of the named classes, in their order; text only if every class has its vector."""
    names = table.classes if classes is None else tuple(classes)
    known_classes = set(table.classes)
    for name in names:
        if name not in known_classes:
            raise unknown_name(f"class of {file}", name, table.classes)
    if len(set(names)) != len(names):
        raise DataError(f"the classes {', '.join(names)} name one twice; name each once")
    has_text = all(name in text for name in names)
    vectors = torch.stack([text[name] for name in names]) if has_text else None
    if names == table.classes:
        return replace(table, text=vectors)
    place = np.full(len(table.classes), -1)
    place[[table.classes.index(name) for name in names]] = np.arange(len(names))
    keep = np.flatnonzero(place[table.labels] >= 0)
    digest = sha256("\x1f".join([table.fingerprint, *names]).encode()).hexdigest()
    return replace(
        table,
        classes=names,
        x=table.x[keep],
        labels=place[table.labels[keep]],
        domains=table.domains[keep],
        clients=table.clients[keep],
        splits=table.splits[keep],
        groups=None if table.groups is None else table.groups[keep],
        content=[table.content[row] for row in keep.tolist()],
        text=vectors,
        patches=None if table.patches is None else table.patches[keep],
        fingerprint=digest,
    )


def save_store(path: str | Path, embedded: EmbeddedTable) -> Path:
    """Writes PATH.safetensors and PATH.json; the second names the first's digest."""
    from safetensors.torch import save_file

    file = Path(path).expanduser().with_suffix(".safetensors")
    tensors = {"x": embedded.x, "y": torch.from_numpy(embedded.labels)}
    tensors |= {"text": embedded.text} if embedded.text is not None else {}
    tensors |= {"patches": embedded.patches[:]} if embedded.patches is not None else {}
    contiguous = {key: value.contiguous() for key, value in tensors.items()}
    with atomic_write(file) as temporary:
        save_file(contiguous, temporary)
    with file.open("rb") as stream:
        digest = file_digest(stream, "sha256").hexdigest()
    words = {
        "name": embedded.name,
        "classes": list(embedded.classes),
        "domains": embedded.domains.tolist(),
        "clients": embedded.clients.tolist(),
        "splits": embedded.splits.tolist(),
        "content": list(embedded.content),
        "scale": embedded.scale,
        "encoder": embedded.encoder,
        "fingerprint": embedded.fingerprint,
        "sha256": digest,
    }
    words |= {} if embedded.groups is None else {"groups": embedded.groups.tolist()}
    write_file(file.with_suffix(".json"), encode_json(words, None))
    return file
