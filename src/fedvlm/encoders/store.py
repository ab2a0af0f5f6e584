"""Stores of embeddings: tables computed before, read from one file, so that a run needs no images and no encoder.

.npz and .safetensors (with strings in a .json of the same name) hold arrays: x or features, y or labels, and
optionally classes, domains, clients, splits, groups (what must stay in one split: a patient), paths, content, text,
text_classes, patches and scale; or one x and y per split as train_x, train_y, val_x, ..., test_y.
.csv and .parquet hold a line per image: the embedding is a column of lists called embedding, or columns numbered
without a gap, as e0, e1, ...; other columns are label, client, domain, split, group and path.
Several findings per image are an array y (samples, findings) of 0, 1 and NaN or -1 (unknown) with `classes` or
`findings` for their names; in a table, a column labels in which names are separated by |. Then `text` may be
(findings, 2, dim), for images without and with the finding.
"""

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.data.manifests import csv_lines, parquet_columns, read_findings
from fedvlm.data.splits import SPLIT_ALIASES, read_splits
from fedvlm.data.table import (
    UNLABELLED,
    Digests,
    EmbeddedTable,
    Findings,
    anonymise_groups,
    check_class_names,
    check_scale,
    describe_bad_row,
    encode_findings,
    relabel,
    string_column,
)
from fedvlm.encoders import Vectors
from fedvlm.encoders.cache import cache_directory
from fedvlm.errors import DataError, EncoderError, join_names, suggest_path, unknown_name
from fedvlm.machine import free_memory
from fedvlm.storage.files import DamagedError, atomic_write, decode_json, encode_json, write_file
from fedvlm.storage.large_tensors import concatenate_rows, iterate_chunks

Columns = dict[str, Any]
MIN_UNPACKED_BYTES = 64_000_000  # that any .npz may unpack to
MAX_COMPRESSION_RATIO = 100  # of a larger one: embeddings hardly shrink, zeros shrink a thousandfold
MAX_CLASSES = 1 << 16  # three times the largest list of classes we know, ImageNet-21k
PER_SAMPLE_KEYS = ("x", "y", "domains", "clients", "splits", "groups", "paths", "content", "patches")
PER_TABLE_KEYS = ("classes", "text", "text_classes", "scale", "name", "encoder", "fingerprint", "sha256")
KNOWN_KEYS = {*PER_SAMPLE_KEYS, *PER_TABLE_KEYS, "labels"}
SPLIT_KEYS = {f"{split}_{key}" for split in SPLIT_ALIASES if split for key in "xy"}
TEXT_COLUMNS = ("y", "labels", "clients", "domains", "splits", "groups", "paths")
ALIASES = {
    **dict.fromkeys(("features", "embedding", "embeddings"), "x"),
    **dict.fromkeys(("label", "labels"), "y"),
    "findings": "classes",
    **{title: f"{title}s" for title in ("client", "domain", "split", "group", "path")},
}


class Store:
    """An encoder whose embeddings were computed before; a run uses its `embedded` table."""

    preprocess = None

    def __init__(self, path: str | Path, *, classes: Sequence[str] | None = None) -> None:
        self.name = f"store:{path}"
        self.embedded = open_store(path, classes)
        self.dim: int = self.embedded.x.shape[1]
        self.scale = self.embedded.scale
        self.offers = frozenset(self.embedded.offers())
        self.identity = {"kind": "store", "rows": self.embedded.fingerprint}

    def embed(self, batch: Sequence[Any], patches: bool) -> Vectors:
        raise EncoderError(f"{self.name} holds embeddings and no weights; name an encoder for images")

    def embed_text(self, sentences: Sequence[str]) -> Tensor:
        raise EncoderError(f"{self.name} has no text tower; use its own text embeddings")


def open_store(path: str | Path, classes: Sequence[str] | None = None) -> EmbeddedTable:
    """Read a store as a table of unit-norm embeddings; `classes` selects some of its classes."""
    file = find_store(Path(path).expanduser())
    columns, x, digest = read_columns(file)
    rows = x.shape[0]
    for key in PER_SAMPLE_KEYS:
        if key in columns and len(columns[key]) != rows:
            raise DataError(f"{file}: {key} has {len(columns[key])} rows and x has {rows}")
    names, labels, findings = _read_labels(file, columns)
    domains = columns.get("domains")
    if domains is None and "paths" in columns:
        parts = [str(path).split("/") for path in columns["paths"]]
        domains = [part[-3] if len(part) > 2 else "" for part in parts]
    content = columns.get("content")
    if content is None:
        content = _row_digests(x)
    unit = _normalise_rows(file, "x", x, columns.get("paths"))
    splits = string_column(columns.get("splits"), rows)
    table = EmbeddedTable(
        name=str(columns.get("name", file.stem)),
        classes=names,
        x=unit,
        labels=labels,
        domains=string_column(domains, rows),
        clients=string_column(columns.get("clients"), rows),
        splits=read_splits(str(file), splits.tolist()) if "splits" in columns else splits,
        groups=anonymise_groups(string_column(columns["groups"], rows).tolist()) if "groups" in columns else None,
        subgroups={key: string_column(values, rows) for key, values in columns.items() if _is_subgroup(key, columns)},
        content=content if isinstance(content, Digests) else [str(digest) for digest in content],
        scale=check_scale(str(file), float(columns.get("scale", 100.0))),
        text=None,
        patches=_read_patches(file, columns.get("patches"), unit.shape[1]),
        encoder=str(columns.get("encoder", f"store {digest[:16]}")),
        fingerprint=str(columns.get("fingerprint", digest)),
        findings=findings,
    )
    if findings is not None:
        return _with_finding_text(file, table, columns.get("text"), classes)
    return _select_classes(file, table, _read_text(file, columns, names, unit.shape[1]), classes)


def read_unlabelled(file: Path) -> tuple[list[str], list[str] | None, Tensor]:
    """Read the name of each row of a store (its path or its number), its group if it has one, and the embeddings."""
    columns, x, _ = read_columns(file)
    paths = columns.get("paths")
    names = [f"{file}[{row}]" for row in range(len(x))] if paths is None else [str(path) for path in paths]
    if "groups" not in columns:
        return names, None, x
    groups = string_column(columns["groups"], len(x)).tolist()
    return names, [group or name for group, name in zip(groups, names, strict=True)], x


def save_store(path: str | Path, embedded: EmbeddedTable) -> Path:
    """Write PATH.safetensors and PATH.json; the second holds the digest of the first."""
    from safetensors.torch import save_file

    file = Path(path).expanduser().with_suffix(".safetensors")
    labels = embedded.labels if embedded.findings is None else embedded.findings[embedded.labels]
    tensors = {"x": embedded.x, "y": torch.from_numpy(labels)}
    if embedded.text is not None:
        negative = embedded.negative_text
        tensors["text"] = embedded.text if negative is None else torch.stack([negative, embedded.text], dim=1)
    tensors |= {"patches": embedded.patches[:]} if embedded.patches is not None else {}
    with atomic_write(file) as temporary:
        save_file({key: value.contiguous() for key, value in tensors.items()}, temporary)
    with file.open("rb") as stream:
        digest = file_digest(stream, "sha256").hexdigest()
    strings = {key: getattr(embedded, key) for key in ("name", "scale", "encoder", "fingerprint")}
    strings |= {key: getattr(embedded, key).tolist() for key in ("domains", "clients", "splits")}
    strings |= {"classes": list(embedded.classes), "content": list(embedded.content), "sha256": digest}
    strings |= {} if embedded.groups is None else {"groups": embedded.groups.tolist()}
    write_file(file.with_suffix(".json"), encode_json(strings, None))
    return file


def find_store(path: Path) -> Path:
    """Return the file of a store, or the only store of a folder."""
    if path.is_dir():
        files = sorted([*path.glob("*.npz"), *path.glob("*.safetensors")])
        if len(files) != 1:
            raise DataError(f"{path} holds {len(files)} stores; name one .npz or .safetensors file in it")
        return files[0]
    if not path.is_file():
        raise DataError(f"there is no store {path}; {suggest_path(path)}give one of {', '.join(STORE_SUFFIXES)}")
    if path.suffix not in READERS:
        raise DataError(f"{path} is not a store; a store ends in {', '.join(STORE_SUFFIXES)}")
    return path


def read_columns(file: Path) -> tuple[Columns, Tensor, str]:
    """Read the columns of a file under the names of a store, its embeddings, and its digest."""
    with file.open("rb") as stream:
        digest = file_digest(stream, "sha256").hexdigest()
    try:
        columns, digest = READERS[file.suffix](file, digest)
    except DataError:
        raise
    except DamagedError as error:
        raise DataError(f"{file.with_suffix('.json')} is damaged ({error}); save again") from error
    except Exception as error:  # zipfile, numpy and safetensors have exceptions of their own
        remedy = "save strings as such, by y.astype(str)" if "pickle" in str(error) else "write it again"
        raise DataError(f"{file} cannot be read ({error}); {remedy}") from error
    columns = _join_splits(file, {ALIASES.get(key, key): value for key, value in columns.items()})
    if "x" not in columns:
        raise DataError(f"{file} has no embeddings; call the array x or features")
    x = torch.from_numpy(columns["x"]) if isinstance(columns["x"], np.ndarray) else columns["x"]
    if x.ndim != 2 or not x.is_floating_point() or 0 in x.shape:
        raise DataError(f"{file}: x is {x.dtype} of {tuple(x.shape)}; it takes (samples, dim) floats")
    return columns, x, digest


def _read_npz(file: Path, digest: str) -> tuple[Columns, str]:
    """Read an .npz whose arrays fit into memory and are not pickled."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    size = sum(member.file_size for member in members)
    max_bytes = MIN_UNPACKED_BYTES + MAX_COMPRESSION_RATIO * file.stat().st_size
    free = free_memory()
    if size > max_bytes or (free is not None and size > free):
        limit = f"{max_bytes:,} for a file of its size" if size > max_bytes else f"{free:,} of free memory"
        remedy = "save it uncompressed, as .safetensors, or in parts"
        raise DataError(f"{file} would unpack to {size:,} bytes, more than {limit}; {remedy}")
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise DataError(f"{file} is not compressed as numpy does; write it with numpy.savez")
    with np.load(file, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}, digest


def _read_safetensors(file: Path, digest: str) -> tuple[Columns, str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    # numpy has no bfloat16
    columns: Columns = {key: t.float() if t.dtype == torch.bfloat16 else t for key, t in tensors.items()}
    sidecar = file.with_suffix(".json")
    if sidecar.is_file():
        text = sidecar.read_bytes()
        columns |= decode_json(text, None)
        if columns.get("sha256", digest) != digest:
            raise DataError(f"{file} is damaged or not the one {sidecar.name} was written for")
        digest = sha256(digest.encode() + text).hexdigest()
    return columns, digest


def _read_csv(file: Path, digest: str) -> tuple[Columns, str]:
    lines = csv_lines(file, "table")
    header = next(lines)
    embedding = _embedding_columns(file, header)
    numbers_at = {embedding} if isinstance(embedding, int) else set(embedding)
    text_indices = {i: _column_name(title) for i, title in enumerate(header) if i not in numbers_at and _is_text(title)}
    rows: list[NDArray[np.float32]] = []
    cells: dict[str, list[str]] = {key: [] for key in text_indices.values()}
    for row, line in enumerate(lines):
        try:
            numbers = json.loads(line[embedding]) if isinstance(embedding, int) else [line[i] for i in embedding]
            rows.append(np.array([number if number != "" else "nan" for number in numbers], np.float32))
        except (ValueError, TypeError) as error:
            raise DataError(f"{file}: row {row} has an embedding that is not numeric ({error})") from error
        for i, key in text_indices.items():
            cells[key].append(line[i])
    return _table_columns(file, rows, cells), digest


def _read_parquet(file: Path, digest: str) -> tuple[Columns, str]:
    columns = parquet_columns(file, "table")
    embedding = _embedding_columns(file, list(columns))
    values = list(columns.values())
    lists: Iterable[Any] = (
        values[embedding] if isinstance(embedding, int) else zip(*(values[i] for i in embedding), strict=True)
    )
    try:
        rows = [np.array(numbers, np.float32) for numbers in lists]
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} has an embedding that is not numeric ({error})") from error
    numbers_at = {embedding} if isinstance(embedding, int) else set(embedding)
    texts = [pair for i, pair in enumerate(columns.items()) if i not in numbers_at and _is_text(pair[0])]
    cells = {_column_name(key): ["" if cell is None else str(cell).strip() for cell in column] for key, column in texts}
    return _table_columns(file, rows, cells), digest


READERS: dict[str, Callable[[Path, str], tuple[Columns, str]]] = {  # take the file's digest, return the table's
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
STORE_SUFFIXES = tuple(READERS)


def _column_name(title: str) -> str:
    """Return a column's name in a store; in a table, `labels` are several findings per image."""
    return title if title == "labels" else ALIASES.get(title, title)


def _is_text(title: str) -> bool:
    """Tell whether a column of a table is read: a known one with a text per sample, or a subgroup."""
    return (key := _column_name(title)) in TEXT_COLUMNS or key not in KNOWN_KEYS


def _embedding_columns(file: Path, titles: Sequence[str]) -> int | list[int]:
    """Find the embedding: one column of lists, or columns numbered without a gap."""
    lists = [i for i, title in enumerate(titles) if ALIASES.get(title, title) == "x"]
    if len(lists) == 1:
        return lists[0]
    numbered: dict[str, dict[int, int]] = {}
    for i, title in enumerate(titles):
        if parts := re.fullmatch(r"(.*?)(\d+)", title):
            numbered.setdefault(parts[1], {})[int(parts[2])] = i
    largest = max(numbered.values(), key=len, default={})
    if len(largest) < 2 or max(largest) - min(largest) + 1 != len(largest):
        problem = f"{file} has no embedding among its columns {join_names(list(titles))}"
        raise DataError(f"{problem}; call a column of lists embedding, or number columns without a gap, as e0, e1, e2")
    return [largest[number] for number in sorted(largest)]


def _table_columns(file: Path, rows: Sequence[NDArray[np.float32]], cells: dict[str, list[str]]) -> Columns:
    lengths = {row.shape for row in rows}
    if len(lengths) != 1:
        problem = f"of {join_names(sorted(map(str, lengths)))}" if rows else "in no row"
        raise DataError(f"{file}: embeddings are {problem}; all rows need one of the same length")
    labels = cells.pop("labels", None)
    if labels is not None and not any("|" in cell for cell in labels):  # one class per image
        cells["y"], labels = labels, None
    if "" in cells.get("y", ()):
        raise DataError(f"{file}: row {cells['y'].index('')} has no label; give it one or drop the row")
    out: Columns = {"x": np.stack(rows), **{key: np.array(column, np.str_) for key, column in cells.items()}}
    if labels is not None:
        titles, out["y"] = read_findings(str(file), {"labels": labels}) or ([], None)
        out["classes"] = titles
    return out


def _is_subgroup(key: str, columns: Columns) -> bool:
    """Tell whether a column is a further one with a string per sample, as sex or scanner."""
    values = columns[key]
    is_text = isinstance(values, np.ndarray) and values.dtype.kind == "U"
    return key not in KNOWN_KEYS and is_text and values.shape == (len(columns.get("x", ())),)


def _join_splits(file: Path, columns: Columns) -> Columns:
    """Join train_x, train_y, val_x, ... to one x and one y; refuse unknown arrays."""
    names = {key for key in columns if not _is_subgroup(key, columns)}
    if unknown := sorted(names - SPLIT_KEYS - set(PER_SAMPLE_KEYS) - set(PER_TABLE_KEYS)):
        raise DataError(
            f"{file} has unknown arrays: {', '.join(unknown)}; "
            f"known are {', '.join(sorted({*PER_SAMPLE_KEYS, *PER_TABLE_KEYS}))}, train_x, train_y, ... "
            "and further columns with a string per sample"
        )
    splits = [split for split in SPLIT_ALIASES if f"{split}_x" in columns]
    if not splits:
        return columns
    pairs = [(np.asarray(columns[f"{s}_x"]), np.asarray(columns.get(f"{s}_y", ()))) for s in splits]
    for split, (x, y) in zip(splits, pairs, strict=True):
        if len(x) != len(y) or x.shape[1:] != pairs[0][0].shape[1:]:
            raise DataError(f"{file}: {split}_x is {x.shape} and {split}_y is {y.shape}")
    rest = {key: value for key, value in columns.items() if key not in SPLIT_KEYS}
    x, y = (np.concatenate(part) for part in zip(*pairs, strict=True))
    splits_of_rows = np.repeat([SPLIT_ALIASES[split] for split in splits], [len(x) for x, _ in pairs])
    return rest | {"x": x, "y": y, "splits": splits_of_rows}


def _read_labels(file: Path, columns: Columns) -> tuple[tuple[str, ...], NDArray[np.int64], Findings | None]:
    """Return class names in the order of the labels, the labels, and the patterns of several findings per image."""
    y = columns.get("y")
    if y is not None and np.ndim(y) == 2:
        matrix = np.asarray(y)
        titles = [str(name) for name in columns.get("classes", [f"finding {i}" for i in range(matrix.shape[1])])]
        check_class_names(str(file), titles)
        return (tuple(titles), *encode_findings(str(file), matrix, titles))
    if y is None:
        if "paths" not in columns:
            raise DataError(f"{file} has no labels; call the array y or labels")
        parts = [str(path).split("/") for path in columns["paths"]]
        if short := [part for part in parts if len(part) < 2]:
            raise DataError(f"{file}: the path {short[0][0]!r} names no class; add the array y")
        y = [part[-2] for part in parts]
    y = np.asarray(y)
    names = None if columns.get("classes") is None else tuple(str(name) for name in columns["classes"])
    if y.dtype.kind in "iu":
        labels = y.astype(np.int64)
        count = len(names) if names is not None else min(int(labels.max()) + 1, MAX_CLASSES)
        if labels.min() < UNLABELLED or labels.max() >= count:
            row = int(np.flatnonzero((labels < UNLABELLED) | (labels >= count))[0])
            raise DataError(f"{file}: row {row} has label {labels[row]}, there are {count} classes")
        names = names or tuple(f"class {number}" for number in range(count))
    elif y.dtype.kind == "U":
        y = np.char.strip(y)  # a trailing blank makes no other class
        names = names if names is not None else tuple(np.unique(y[y != ""]).tolist())
        index = {"": UNLABELLED} | {name: number for number, name in enumerate(names)}
        if unknown := sorted({str(name) for name in y} - set(index)):
            raise unknown_name(f"class of {file}", unknown[0], names)
        labels = np.array([index[str(name)] for name in y], np.int64)
    else:
        raise DataError(f"{file}: labels are {y.dtype}; they must be whole numbers or strings")
    check_class_names(str(file), names)
    return names, labels, None


def _with_finding_text(file: Path, table: EmbeddedTable, text: Any, classes: Sequence[str] | None) -> EmbeddedTable:
    """Add the text embeddings (findings, 2, dim) of images without and with each finding."""
    if classes is not None and tuple(classes) != table.classes:
        raise DataError(f"{file} has several findings per image, of which none can be left out: {table.classes}")
    if text is None:
        return table
    values, shape = torch.as_tensor(text), (len(table.classes), 2, table.x.shape[1])
    if tuple(values.shape) != shape:
        raise DataError(f"{file}: text is {tuple(values.shape)}; several findings per image need {shape}")
    negative, positive = (_normalise_rows(file, "text", values[:, i].contiguous()) for i in (0, 1))
    return replace(table, text=positive, negative_text=negative)


def _normalise_rows(file: Path, key: str, values: Tensor, names: Sequence[Any] | None = None) -> Tensor:
    """Return float32 rows of unit norm; refuse a row that has no direction."""
    norms = torch.cat([part.to(torch.float32).norm(dim=1) for _, part in iterate_chunks(values)])
    bad = ~torch.isfinite(norms) | (norms == 0)
    if bad.any():
        row = int(bad.nonzero()[0])
        name = f" ({names[row]})" if names is not None else ""
        problem = f"{describe_bad_row(values[row])}, one of {int(bad.sum())} such rows"
        raise DataError(f"{file}: row {row}{name} of {key} {problem}; drop or recompute them")
    # rows of unit norm stay as they are, memory-mapped and to the bit
    is_unit = bool((norms - 1).abs().max() < 1e-6)
    if is_unit and values.dtype == torch.float32:
        return values
    parts = (part.to(torch.float32) for _, part in iterate_chunks(values))
    rows, dim = values.shape
    units = parts if is_unit else (normalize(part, dim=1) for part in parts)
    return concatenate_rows(cache_directory(), (rows, dim), units)


def _row_digests(x: Tensor) -> Digests:
    """Digest the bytes of every row."""
    out = bytearray(32 * len(x))
    for first, part in iterate_chunks(x):
        for number, row in enumerate(part.numpy(), first):
            out[32 * number : 32 * number + 32] = sha256(row.data).digest()
    return Digests(out)


def _read_patches(file: Path, values: Any, dim: int) -> Tensor | None:
    if values is None:
        return None
    patches = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if patches.ndim != 3 or patches.shape[2] != dim:
        raise DataError(f"{file}: patches are {tuple(patches.shape)}; they must be (samples, patches, {dim})")
    patches = patches.to(torch.float16)
    for first in range(0, len(patches), 256):
        is_finite = torch.isfinite(patches[first : first + 256]).flatten(1).all(dim=1)
        if not is_finite.all():
            row = first + int((~is_finite).nonzero()[0])
            raise DataError(f"{file}: row {row} of patches holds NaN or infinity; recompute it")
    return patches


def _read_text(file: Path, columns: Columns, names: tuple[str, ...], dim: int) -> dict[str, Tensor]:
    """Return the text embeddings by class name."""
    if "text" not in columns:
        return {}
    text = torch.as_tensor(columns["text"])
    owners = [str(name) for name in columns.get("text_classes", names)]
    if text.ndim != 2 or text.shape != (len(owners), dim):
        needed = f"{len(owners)} classes and embeddings of {dim} need ({len(owners)}, {dim})"
        raise DataError(f"{file}: text is {tuple(text.shape)}; {needed}; name fewer in text_classes")
    return dict(zip(owners, _normalise_rows(file, "text", text), strict=True))


def _select_classes(
    file: Path, table: EmbeddedTable, text: dict[str, Tensor], classes: Sequence[str] | None
) -> EmbeddedTable:
    """Select the samples of the named classes, in their order; text only if every class has an embedding."""
    names = table.classes if classes is None else tuple(classes)
    known = set(table.classes)
    for name in names:
        if name not in known:
            raise unknown_name(f"class of {file}", name, table.classes)
    check_class_names("classes", names)
    vectors = torch.stack([text[name] for name in names]) if all(name in text for name in names) else None
    if names == table.classes:
        return replace(table, text=vectors)
    place = np.full(len(table.classes), -1)
    place[[table.classes.index(name) for name in names]] = np.arange(len(names))
    rows = np.flatnonzero((table.labels < 0) | (relabel(table.labels, place) >= 0))
    digest = sha256("\x1f".join([table.fingerprint, *names]).encode()).hexdigest()
    labels = relabel(table.labels[rows], place)
    return table.select(rows, classes=names, labels=labels, text=vectors, fingerprint=digest)
