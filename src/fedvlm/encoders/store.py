"""Embeddings computed before, in one file: no images, no encoder, the same runs.

Arrays, in .npz or .safetensors (strings then in a .json of the same name beside it):
x or features, y or labels, and optionally classes, domains, clients, splits, groups (what stays in
one part: a patient), paths, content, text, text_classes, patches, scale; or one x and y per split
as train_x, train_y, val_x, ..., test_y.
A .csv or .parquet has a line per image instead: see fedvlm/encoders/tables.py.
"""

import json
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.data.manifests import csv_lines, parquet_columns
from fedvlm.data.table import Digests, EmbeddedTable, Strings, anonymise_groups
from fedvlm.encoders import Vectors
from fedvlm.encoders.cache import cache_directory
from fedvlm.errors import DataError, EncoderError, join_names, suggest_path, unknown_name
from fedvlm.machine import free_memory
from fedvlm.storage.files import DamagedError, atomic_write, decode_json, encode_json, write_file
from fedvlm.storage.large_tensors import concatenate_rows, iterate_chunks

Columns = dict[str, Any]


TABLE_SUFFIXES = (".csv", ".parquet")

STORE_SUFFIXES = (".npz", ".safetensors", *TABLE_SUFFIXES)
MIN_UNPACKED_BYTES = 64_000_000  # bytes that any .npz may unpack to
MAX_COMPRESSION_RATIO = 100  # and for each of its own bytes: embeddings hardly shrink, zeros shrink a thousandfold
SPLIT_OF_PREFIX = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
PER_SAMPLE_KEYS = ("x", "y", "domains", "clients", "splits", "groups", "paths", "content", "patches")
PER_TABLE_KEYS = ("classes", "text", "text_classes", "scale", "name", "encoder", "fingerprint", "sha256")
ALIASES = {
    **dict.fromkeys(("features", "embedding", "embeddings"), "x"),
    **dict.fromkeys(("label", "labels"), "y"),
    **{title: f"{title}s" for title in ("client", "domain", "split", "group", "path")},
}
TEXT_COLUMNS = ("y", "clients", "domains", "splits", "groups", "paths")
MAX_CLASSES = 1 << 16  # three times the largest list of classes we know, ImageNet-21k


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


def join_splits(file: Path, columns: Columns) -> Columns:
    """One x and one y out of train_x, train_y, val_x, ...; refuses arrays it does not know."""
    split_keys = {f"{split}_{key}" for split in SPLIT_OF_PREFIX for key in "xy"}
    if strange := sorted(set(columns) - split_keys - set(PER_SAMPLE_KEYS) - set(PER_TABLE_KEYS)):
        raise DataError(
            f"{file} has arrays nobody knows: {', '.join(strange)}; "
            f"known are {', '.join(sorted({*PER_SAMPLE_KEYS, *PER_TABLE_KEYS}))} and train_x, train_y, ..."
        )
    parts = [split for split in SPLIT_OF_PREFIX if f"{split}_x" in columns]
    if not parts:
        return columns
    pairs = [(np.asarray(columns[f"{p}_x"]), np.asarray(columns.get(f"{p}_y", ()))) for p in parts]
    for part, (x, y) in zip(parts, pairs, strict=True):
        if len(x) != len(y) or x.shape[1:] != pairs[0][0].shape[1:]:
            raise DataError(f"{file}: {part}_x is {x.shape} and {part}_y is {y.shape}")
    rest = {key: value for key, value in columns.items() if key not in split_keys}
    sizes = [len(x) for x, _ in pairs]
    return rest | {
        "x": np.concatenate([x for x, _ in pairs]),
        "y": np.concatenate([y for _, y in pairs]),
        "splits": np.repeat([SPLIT_OF_PREFIX[part] for part in parts], sizes),
    }


def read_labels(file: Path, columns: Columns, rows: int) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Class names in the order of the label ids, and the labels."""
    y = columns.get("y")
    if y is None:
        if "paths" not in columns:
            raise DataError(f"{file} has no labels; call the array y or labels")
        parts = [str(label).split("/") for label in columns["paths"]]
        if short := [label for label in parts if len(label) < 2]:
            raise DataError(f"{file}: the path {short[0][0]!r} names no class; add the array y")
        y = [part[-2] for part in parts]
    y = np.asarray(y)
    named = columns.get("classes")
    if y.dtype.kind in "iu":
        ids = y.astype(np.int64)
        count = len(named) if named is not None else min(int(ids.max()) + 1, MAX_CLASSES)
        names = tuple(str(label) for label in named) if named is not None else ()
        if ids.min() < 0 or ids.max() >= count:
            row = int(np.flatnonzero((ids < 0) | (ids >= count))[0])
            raise DataError(f"{file}: row {row} has label {ids[row]}, there are {count} classes")
        names = names or tuple(f"class {label}" for label in range(count))
    elif y.dtype.kind == "U":
        y = np.char.strip(y)  # a blank behind a name makes no other class
        names = tuple(str(label) for label in (named if named is not None else np.unique(y)))
        index = {name: label for label, name in enumerate(names)}
        if strange := sorted({str(label) for label in y} - set(names)):
            raise unknown_name(f"class of {file}", strange[0], names)
        ids = np.array([index[str(label)] for label in y], np.int64)
    else:
        raise DataError(f"{file}: labels are {y.dtype}; they take whole numbers or strings")
    if len(set(names)) != len(names):
        raise DataError(f"{file}: two classes have the same name; give each its own")
    return names, ids


def normalise_rows(file: Path, key: str, values: Tensor, names: Sequence[Any] | None = None) -> Tensor:
    """Float32 rows of unit norm; a row that has no direction is named."""
    norms = torch.cat([part.to(torch.float32).norm(dim=1) for _, part in iterate_chunks(values)])
    bad = ~torch.isfinite(norms) | (norms == 0)
    if bad.any():
        row = int(bad.nonzero()[0])
        called = f" ({names[row]})" if names is not None else ""
        fault = "is zero" if norms[row] == 0 else "holds NaN or infinity"
        raise DataError(
            f"{file}: row {row}{called} of {key} {fault}, one of {int(bad.sum())} such rows; drop or recompute them"
        )
    # keeps rows that are unit already as they are, memory-mapped and bit by bit
    as_they_are = bool((norms - 1).abs().max() < 1e-6)
    if as_they_are and values.dtype == torch.float32:
        return values
    parts = (part.to(torch.float32) for _, part in iterate_chunks(values))
    made = parts if as_they_are else (normalize(part, dim=1) for part in parts)
    rows, dim = values.shape
    return concatenate_rows(cache_directory(), (rows, dim), made)


def string_column(values: Any, rows: int) -> Strings:
    """A column of words; one that says nothing takes no memory."""
    if values is None:
        return np.broadcast_to(np.array(""), rows)
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        return np.array([str(cell) for cell in values], np.str_)
    numbers, inverse = np.unique(array, return_inverse=True)
    return np.array([str(cell) for cell in numbers.tolist()])[inverse]


def read_patches(file: Path, values: Any, dim: int) -> Tensor | None:
    if values is None:
        return None
    patches = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if patches.ndim != 3 or patches.shape[2] != dim:
        raise DataError(f"{file}: patches are {tuple(patches.shape)}; they take (rows, patches, {dim})")
    patches = patches.to(torch.float16)
    for first in range(0, len(patches), 256):
        good = torch.isfinite(patches[first : first + 256]).flatten(1).all(dim=1)
        if not good.all():
            row = first + int((~good).nonzero()[0])
            raise DataError(f"{file}: row {row} of patches holds NaN or infinity; recompute it")
    return patches


def read_text(file: Path, columns: Columns, names: tuple[str, ...], dim: int) -> dict[str, Tensor]:
    """The text vectors there are, by class name."""
    if "text" not in columns:
        return {}
    text = torch.as_tensor(columns["text"])
    owners = [str(class_name) for class_name in columns.get("text_classes", names)]
    if text.ndim != 2 or text.shape != (len(owners), dim):
        raise DataError(
            f"{file}: text is {tuple(text.shape)}; {len(owners)} classes and embeddings of {dim} "
            f"take ({len(owners)}, {dim}); name fewer in text_classes"
        )
    return dict(zip(owners, normalise_rows(file, "text", text), strict=True))


def read_table(file: Path) -> dict[str, Any]:
    """The columns of a table as a store has them: x, and words as strings."""
    if file.suffix.lower() == ".csv":
        titles, x, cells = _csv(file)
    else:
        titles, x, cells = _parquet(file)
    words = {ALIASES.get(title, title): column for title, column in zip(titles, cells, strict=True)}
    text_columns = {key: np.array(words[key], np.str_) for key in TEXT_COLUMNS if key in words}
    if "y" in text_columns and not text_columns["y"].all():
        row = int(np.flatnonzero(text_columns["y"] == "")[0])
        raise DataError(f"{file}: row {row} has no label; give it one or drop the row")
    return {"x": x, **text_columns}


def _csv(file: Path) -> tuple[list[str], NDArray[np.float32], list[list[str]]]:
    lines = csv_lines(file, "table")
    header = next(lines)
    embedding_index = embedding_columns(file, header)
    text_indices = [i for i, title in enumerate(header) if ALIASES.get(title, title) in TEXT_COLUMNS]
    rows: list[NDArray[np.float32]] = []
    cells: list[list[str]] = [[] for _ in text_indices]
    for row, line in enumerate(lines):
        try:
            cell_values = (
                json.loads(line[embedding_index])
                if isinstance(embedding_index, int)
                else [line[i] for i in embedding_index]
            )
            rows.append(np.array([cell if cell != "" else "nan" for cell in cell_values], np.float32))
        except (ValueError, TypeError) as error:
            raise DataError(f"{file}: row {row} has an embedding of no numbers ({error})") from error
        for column, i in zip(cells, text_indices, strict=True):
            column.append(line[i])
    return [header[i] for i in text_indices], stack_rows(file, rows), cells


def _parquet(file: Path) -> tuple[list[str], NDArray[np.float32], list[list[str]]]:
    columns = parquet_columns(file, "table")
    embedding_index = embedding_columns(file, list(columns))
    values = list(columns.values())
    lists: Iterable[Any] = (
        values[embedding_index]
        if isinstance(embedding_index, int)
        else zip(*(values[i] for i in embedding_index), strict=True)
    )
    try:
        rows = [np.array(entry, np.float32) for entry in lists]
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} has an embedding of no numbers ({error})") from error
    titles = [entry for entry in columns if ALIASES.get(entry, entry) in TEXT_COLUMNS]
    cells = [["" if c is None else str(c).strip() for c in columns[entry]] for entry in titles]
    return titles, stack_rows(file, rows), cells


def embedding_columns(file: Path, titles: Sequence[str]) -> int | list[int]:
    """Where the embedding is: one column of lists, or columns numbered without a gap."""
    lists = [i for i, title in enumerate(titles) if ALIASES.get(title, title) == "x"]
    if len(lists) == 1:
        return lists[0]
    numbered: dict[str, dict[int, int]] = {}
    for i, title in enumerate(titles):
        if parts := re.fullmatch(r"(.*?)(\d+)", title):
            numbered.setdefault(parts[1], {})[int(parts[2])] = i
    largest = max(numbered.values(), key=len, default={})
    first = min(largest, default=0)
    if len(largest) < 2 or max(largest) - first + 1 != len(largest):
        raise DataError(
            f"{file} has no embedding among its columns {join_names(list(titles))}; call a column of "
            "lists embedding, or number columns without a gap, as e0, e1, e2"
        )
    return [largest[number] for number in sorted(largest)]


def stack_rows(file: Path, rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    lengths = {row.shape for row in rows}
    if len(lengths) != 1:
        problem = f"of {join_names(sorted(map(str, lengths)))}" if rows else "in no row"
        raise DataError(f"{file}: embeddings are {problem}; all rows take one of the same length")
    return np.stack(rows)
