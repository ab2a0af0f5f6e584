"""Data sets of the `datasets` library: an id of the Hub, or a copy saved with save_to_disk."""

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
from fedvlm.data.table import Dataset, split_column, string_column, tabulate
from fedvlm.errors import DataError, SettingsError, join_names, unknown_name
from fedvlm.plugins import add_entry, load_outside

LABEL_COLUMNS = ("label", "labels", "class")  # what a column is called if nobody says
DOMAIN_COLUMNS = ("domain",)
CLIENT_COLUMNS = ("client", "writer_id", "client_id")
OFFLINE_REMEDY = (
    "without the Hub, run datasets.load_dataset(ID).save_to_disk(DIR) where there is a network, "
    "copy DIR here and open hub:DIR"
)


def read_hub(
    path: str | Path,
    image: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    client: str | None = None,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """A data set of the Hugging Face Hub, or a folder that save_to_disk wrote.

    Images stay undecoded; the label column's own class names give their order.
    The named columns are used, or the ones that are usually called so. If the data come in several
    splits these are kept; a single one is no split.
    """
    parts = _load(str(path))
    rows = _join(parts)
    columns = rows.features
    image = _column(str(path), columns, "image", image, _images(columns))
    label = _column(str(path), columns, "label", label, LABEL_COLUMNS)
    domain = _optional(str(path), columns, "domain", domain, DOMAIN_COLUMNS)
    client = _optional(str(path), columns, "client", client, CLIENT_COLUMNS)
    splits = [name for name, part in parts.items() for _ in range(len(part))]
    return tabulate(
        Path(str(path)).name,
        Arrow(_undecoded(rows, image), image, str(path)),
        _strings(rows, label),
        classes if classes is not None else _names(rows, label),
        _strings(rows, domain) if domain else None,
        _strings(rows, client) if client else None,
        splits if len(parts) > 1 else None,
    )


def is_saved(path: Path) -> bool:
    """Whether a folder was written by save_to_disk."""
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def _load(path: str) -> dict[str, Any]:
    """The splits of a data set by name."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"opening {path} needs datasets; install fedvlm[datasets]") from error
    saved = Path(path).is_dir()
    if saved and not is_saved(Path(path)):
        raise DataError(f"{path} was not written by save_to_disk; name its parent, or open it as a folder")
    if not saved and not _cached(path) and (reason := hub.unreachable_reason()):
        raise DataError(f"{path} cannot be loaded ({reason}); {OFFLINE_REMEDY}")
    try:
        loaded = datasets.load_from_disk(path) if saved else datasets.load_dataset(path)
    except Exception as error:  # the library and the Hub client raise dozens of kinds
        remedy = "save it again" if saved else OFFLINE_REMEDY
        raise DataError(f"{path} cannot be loaded ({type(error).__name__}: {_first_line(error)}); {remedy}") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _cached(name: str) -> bool:
    """Whether the library may have it from before; then it finds its own way without the Hub."""
    import datasets

    return (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _join(parts: dict[str, Any]) -> Any:
    import datasets

    if not parts:
        raise DataError("the data set has no splits; save it again")
    return datasets.concatenate_datasets(list(parts.values()))


def _images(columns: Any) -> tuple[str, ...]:
    import datasets

    return tuple(name for name, kind in columns.items() if isinstance(kind, datasets.Image))


def _column(path: str, columns: Any, role: str, name: str | None, usual: Sequence[str]) -> str:
    column = _optional(path, columns, role, name, usual)
    if column is None:
        raise DataError(
            f"{path} has no column for the {role}; its columns are {join_names(list(columns))}; "
            f"name it, as {role}=COLUMN"
        )
    return column


def _optional(path: str, columns: Any, role: str, name: str | None, usual: Sequence[str]) -> str | None:
    if name is not None and name not in columns:
        raise DataError(f"{path} has no column {name!r} for the {role}; its columns are {join_names(list(columns))}")
    return name or next((title for title in usual if title in columns), None)


def _undecoded(rows: Any, image: str) -> Any:
    import datasets

    if not isinstance(rows.features[image], datasets.Image):
        raise DataError(f"the column {image!r} holds {rows.features[image]}, not images; name another")
    return rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))


def _names(rows: Any, label: str) -> list[str] | None:
    names = getattr(rows.features[label], "names", None)
    return list(names) if names else None


def _strings(rows: Any, column: str) -> list[str]:
    """A column as strings; numbers of a ClassLabel by their names."""
    names = getattr(rows.features[column], "names", None)
    values = rows.select_columns([column])[:][column]
    if any(value is None or (names and value < 0) for value in values):
        raise DataError(
            f"the column {column!r} has rows without a value (a test split without labels?); "
            "save the data set without them"
        )
    return [names[value] for value in values] if names else [str(value) for value in values]


CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
IMAGE_SIDE = 28


def is_leaf(folder: Path) -> bool:
    """Whether a folder holds LEAF's files; any other .json says nothing about its images."""
    for file in (*folder.glob("*.json"), *folder.glob("train/*.json")):
        if not file.is_file():  # a FIFO would wait for ever
            continue
        with file.open("rb") as stream:
            start = stream.read(4096)
        if b'"users"' in start or b'"user_data"' in start:
            return True
    return False


def read_leaf(path: str | Path) -> Dataset:
    """A folder of LEAF's FEMNIST; writers are clients, train/ and test/ folders are splits.

    Characters nobody wrote are no classes, so that a sample of digits has ten.
    """
    root = Path(path)
    split = (root / "train").is_dir() and (root / "test").is_dir()
    folders = {name: root / name for name in ("train", "test")} if split else {"": root}
    pixels, labels, writers, names, splits = [], [], [], [], []
    for part, folder in folders.items():
        for file in sorted(json_file for json_file in folder.glob("*.json") if json_file.is_file()):
            for writer, (x, y) in sorted(_writers(file).items()):
                pixels.append(x)
                labels += y
                writers += [writer] * len(y)
                names += [f"{file.relative_to(root)}:{writer}[{row}]" for row in range(len(y))]
                splits += [part] * len(y)
    if not labels:
        raise DataError(
            f"{root} has no LEAF data; name the folder with its .json files, or the one with train/ and test/"
        )
    source = Pixels(np.concatenate(pixels), names)
    present, ids = np.unique(np.array(labels, dtype=np.int64), return_inverse=True)
    return Dataset(  # not through `tabulate`: A and a are two classes here, by their numbers
        name=root.name,
        classes=tuple(CLASSES[label] for label in present),
        source=source,
        labels=ids.astype(np.int64),
        domains=string_column(None, len(labels)),
        clients=string_column(writers, len(labels)),
        splits=split_column(root.name, source, splits, len(labels)),
        templates=("a picture of the character: {}",),
    )


def _writers(file: Path) -> dict[str, tuple[NDArray[np.uint8], list[int]]]:
    """Images (rows, 28, 28) and labels of each writer of one file."""
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
            f"{file} is not LEAF's FEMNIST ({type(error).__name__}: {error}); each writer has x, "
            f"lists of {IMAGE_SIDE * IMAGE_SIDE} values from 0 to 1, and y, labels from 0 to {len(CLASSES) - 1}"
        ) from error
    return writers


GROUP = "fedvlm.data"
Reader = Callable[..., Dataset]  # of a place, and of options by name
READERS: dict[str, Reader] = {  # by what stands before the colon
    "folder": folders.read_folder,
    "manifest": manifests.read_manifest,
    "hub": read_hub,
    "coop": manifests.read_coop,
    "leaf": read_leaf,
}
KIND_OF_SUFFIX = {".zip": "folder", ".csv": "manifest", ".parquet": "manifest", ".json": "coop"}


def register(word: str, reader: Reader) -> Reader:
    """Adds a kind of data, so that `word:PLACE` is opened by the reader with its options."""
    if not getattr(reader, "__doc__", None):
        raise SettingsError(f"data {word!r}: its reader has no docstring; say in a line what it is")
    add_entry(READERS, "data", word, reader)
    return reader


def kinds() -> dict[str, Reader]:
    """All kinds: our own and those of outside packages (entry-point group fedvlm.data)."""
    load_outside(GROUP)
    return dict(READERS)


def detect_kind(name: str) -> tuple[str, str] | None:
    """Kind and place of `kind:place` or of a path; None if it is neither."""
    kind, colon, place = name.partition(":")
    if colon and kind in kinds():
        return kind, place
    path = Path(name)
    if path.is_dir():
        if is_saved(path):
            return "hub", name
        return ("leaf" if is_leaf(path) else "folder"), name
    if not path.is_file():
        return None
    if path.suffix.lower() in (".npz", ".safetensors"):
        raise DataError(
            f"{path} holds no images; embeddings take the place of data and encoder: --encoder store:{path}"
        )
    if path.suffix.lower() not in KIND_OF_SUFFIX:
        raise DataError(
            f"{path} is of no kind that is known; a data set is a folder or ends in "
            f"{', '.join(KIND_OF_SUFFIX)}; or say which kind it is, as manifest:{path}"
        )
    return KIND_OF_SUFFIX[path.suffix.lower()], name


def call_reader(title: str, reader: Reader, first: Any, options: Mapping[str, Any]) -> Dataset:
    """Calls a reader with options a person gave, refusing those it does not have."""
    allowed = list(signature(reader).parameters)[1:]
    for option in options:
        if option not in allowed:
            raise unknown_name(f"option of {title} data", option, allowed)
    return reader(first, **options)
