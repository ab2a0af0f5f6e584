"""The columns of a store, checked: names, lengths, labels, directions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.data.table import Strings
from fedvlm.encoders.cache.folder import cache_directory
from fedvlm.errors import DataError, unknown_name
from fedvlm.storage.large_tensors import concatenate_rows, iterate_chunks

Columns = dict[str, Any]
SPLIT_OF_PREFIX = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
PER_SAMPLE_KEYS = ("x", "y", "domains", "clients", "splits", "groups", "paths", "content", "patches")
MAX_CLASSES = 1 << 16  # three times the largest list of classes we know, ImageNet-21k
PER_TABLE_KEYS = ("classes", "text", "text_classes", "scale", "name", "encoder", "fingerprint", "sha256")


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
