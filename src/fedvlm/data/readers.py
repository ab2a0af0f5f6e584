"""Readers of data sets by kind (`kind:place`), with those of the Hugging Face Hub and of LEAF."""

import json
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm import hub
from fedvlm.data import folders, manifests
from fedvlm.data.sources import Arrow, Pixels
from fedvlm.data.splits import read_splits
from fedvlm.data.table import Dataset, string_column, tabulate
from fedvlm.errors import DataError, SettingsError, join_names, unknown_name
from fedvlm.plugins import add_entry, load_outside, require

GROUP = "fedvlm.data"
Reader = Callable[..., Dataset]  # takes a place, and options by name
LABEL_COLUMNS = ("label", "labels", "class")  # column names that are tried if none is given
DOMAIN_COLUMNS = ("domain",)
CLIENT_COLUMNS = ("client", "writer_id", "client_id")
OFFLINE_REMEDY = "without the Hub, run datasets.load_dataset(ID).save_to_disk(DIR) elsewhere, and open hub:DIR"
CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")  # of FEMNIST
IMAGE_SIDE = 28  # of FEMNIST


def read_hub(
    path: str | Path,
    image: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    client: str | None = None,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """A data set of the Hugging Face Hub, or a folder that save_to_disk wrote.

    Images stay undecoded; classes come in the order of the label column's class names. Columns are the given ones, or
    those with a usual name. Several splits are kept; a single one is no split.
    """
    parts = _load(str(path))
    if not parts:
        raise DataError(f"{path} has no splits; save it again")
    import datasets

    rows = datasets.concatenate_datasets(list(parts.values()))
    images = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    columns = {
        "image": _column(path, rows.features, "image", image, images),
        "label": _column(path, rows.features, "label", label, LABEL_COLUMNS),
        "domain": _column(path, rows.features, "domain", domain, DOMAIN_COLUMNS),
        "client": _column(path, rows.features, "client", client, CLIENT_COLUMNS),
    }
    for role in ("image", "label"):
        if columns[role] is None:
            titles = join_names(list(rows.features))
            raise DataError(f"{path} has no column for the {role}; its columns are {titles}; name it, as {role}=COLUMN")
    if columns["image"] not in images:
        kind = rows.features[columns["image"]]
        raise DataError(f"the column {columns['image']!r} holds {kind}, not images; name another")
    undecoded = rows.select_columns([columns["image"]]).cast_column(columns["image"], datasets.Image(decode=False))
    names = getattr(rows.features[columns["label"]], "names", None)
    splits = [name for name, part in parts.items() for _ in range(len(part))]
    return tabulate(
        Path(str(path)).name,
        Arrow(undecoded, str(columns["image"]), str(path)),
        _strings(rows, str(columns["label"])),
        classes if classes is not None else list(names) if names else None,
        _strings(rows, columns["domain"]) if columns["domain"] else None,
        _strings(rows, columns["client"]) if columns["client"] else None,
        splits if len(parts) > 1 else None,
    )


def is_saved(path: Path) -> bool:
    """Whether a folder was written by save_to_disk."""
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def _load(path: str) -> dict[str, Any]:
    """Load the splits of a data set by name."""
    datasets = require("datasets", f"opening {path} needs datasets", "datasets", DataError)
    saved = Path(path).is_dir()
    if saved and not is_saved(Path(path)):
        raise DataError(f"{path} was not written by save_to_disk; name its parent, or open it as a folder")
    # a data set in the library's cache is found without the Hub
    is_cached = (Path(datasets.config.HF_DATASETS_CACHE) / path.replace("/", "___")).is_dir()
    if not saved and not is_cached and (reason := hub.unreachable_reason()):
        raise DataError(f"{path} cannot be loaded ({reason}); {OFFLINE_REMEDY}")
    try:
        loaded = datasets.load_from_disk(path) if saved else datasets.load_dataset(path)
    except Exception as error:  # the library and the Hub client raise dozens of kinds
        remedy = "save it again" if saved else OFFLINE_REMEDY
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{path} cannot be loaded ({type(error).__name__}: {reason}); {remedy}") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _column(path: str | Path, columns: Any, role: str, name: str | None, usual: Sequence[str]) -> str | None:
    if name is not None and name not in columns:
        raise DataError(f"{path} has no column {name!r} for the {role}; its columns are {join_names(list(columns))}")
    return name or next((title for title in usual if title in columns), None)


def _strings(rows: Any, column: str) -> list[str]:
    """Read a column as strings; numbers of a ClassLabel become their names."""
    names = getattr(rows.features[column], "names", None)
    values = rows.select_columns([column])[:][column]
    if any(value is None or (names and value < 0) for value in values):
        raise DataError(f"the column {column!r} has rows without a value (a test split?); leave them out")
    return [names[value] for value in values] if names else [str(value) for value in values]


def is_leaf(folder: Path) -> bool:
    """Whether a folder holds LEAF's files; other .json files do not count."""
    for file in (*folder.glob("*.json"), *folder.glob("train/*.json")):
        if not file.is_file():  # opening a FIFO would block
            continue
        with file.open("rb") as stream:
            start = stream.read(4096)
        if b'"users"' in start or b'"user_data"' in start:
            return True
    return False


def read_leaf(path: str | Path) -> Dataset:
    """A folder of LEAF's FEMNIST; writers are clients, train/ and test/ folders are splits.

    Characters without an image are no classes, so that a subset of digits has ten.
    """
    root = Path(path)
    has_splits = (root / "train").is_dir() and (root / "test").is_dir()
    split_folders = {name: root / name for name in ("train", "test")} if has_splits else {"": root}
    pixels, labels, writers, names, splits = [], [], [], [], []
    for split, folder in split_folders.items():
        for file in sorted(json_file for json_file in folder.glob("*.json") if json_file.is_file()):
            for writer, (x, y) in sorted(_read_writers(file).items()):
                pixels.append(x)
                labels += y
                writers += [writer] * len(y)
                names += [f"{file.relative_to(root)}:{writer}[{row}]" for row in range(len(y))]
                splits += [split] * len(y)
    if not labels:
        raise DataError(f"{root} has no LEAF data; name the folder of its .json files, or that of train/ and test/")
    present, ids = np.unique(np.array(labels, dtype=np.int64), return_inverse=True)
    return Dataset(  # not by `tabulate`: A and a are two classes here
        name=root.name,
        classes=tuple(CLASSES[label] for label in present),
        source=Pixels(np.concatenate(pixels), names),
        labels=ids.astype(np.int64),
        domains=string_column(None, len(labels)),
        clients=string_column(writers, len(labels)),
        splits=read_splits(root.name, splits),
        templates=("a picture of the character: {}",),
    )


def _read_writers(file: Path) -> dict[str, tuple[NDArray[np.uint8], list[int]]]:
    """Read images (samples, 28, 28) and labels of each writer of one file."""
    writers = {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))["user_data"]
        for writer, rows in data.items():
            x = np.asarray(rows["x"], dtype=np.float64).reshape(-1, IMAGE_SIDE, IMAGE_SIDE)
            y = [int(label) for label in rows["y"]]
            if len(x) != len(y) or not np.isfinite(x).all() or x.min() < 0 or x.max() > 1:
                raise ValueError(f"writer {writer}: {len(x)} images, {len(y)} labels")
            if y and not 0 <= min(y) <= max(y) < len(CLASSES):
                raise ValueError(f"writer {writer}: labels {min(y)} to {max(y)}")
            writers[str(writer)] = np.rint(x * 255).astype(np.uint8), y
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(
            f"{file} is not LEAF's FEMNIST ({type(error).__name__}: {error}); each writer has x, lists of "
            f"{IMAGE_SIDE * IMAGE_SIDE} values from 0 to 1, and y, labels from 0 to {len(CLASSES) - 1}"
        ) from error
    return writers


READERS: dict[str, Reader] = {  # by the word before the colon
    "folder": folders.read_folder,
    "manifest": manifests.read_manifest,
    "hub": read_hub,
    "coop": manifests.read_coop,
    "leaf": read_leaf,
}
KIND_OF_SUFFIX = {".zip": "folder", ".csv": "manifest", ".parquet": "manifest", ".json": "coop"}


def register(word: str, reader: Reader) -> Reader:
    """Add a kind of data, so that `word:PLACE` is opened by the reader with its options."""
    if not getattr(reader, "__doc__", None):
        raise SettingsError(f"data {word!r}: its reader has no docstring; describe it in one line")
    add_entry(READERS, "data", word, reader)
    return reader


def kinds() -> dict[str, Reader]:
    """Return all kinds: our own and those of outside packages (entry-point group fedvlm.data)."""
    load_outside(GROUP)
    return dict(READERS)


def detect_kind(name: str) -> tuple[str, str] | None:
    """Return kind and place of `kind:place` or of a path; None if it is neither."""
    kind, colon, place = name.partition(":")
    if colon and kind in kinds():
        return kind, place
    path = Path(name)
    if path.is_dir():
        return ("hub" if is_saved(path) else "leaf" if is_leaf(path) else "folder"), name
    if not path.is_file():
        return None
    suffix = path.suffix.lower()
    if suffix in (".npz", ".safetensors"):
        raise DataError(f"{path} holds embeddings, which replace data and encoder; write --encoder store:{path}")
    if suffix not in KIND_OF_SUFFIX:
        endings = ", ".join(KIND_OF_SUFFIX)
        raise DataError(f"the kind of {path} is unknown; name it, as manifest:{path}, a folder, or a file in {endings}")
    return KIND_OF_SUFFIX[suffix], name


def call_reader(title: str, reader: Reader, place: Any, options: Mapping[str, Any]) -> Dataset:
    """Call a reader with a user's options; refuse options it does not have."""
    allowed = list(signature(reader).parameters)[1:]
    for option in options:
        if option not in allowed:
            raise unknown_name(f"option of {title} data", option, allowed)
    return reader(place, **options)
