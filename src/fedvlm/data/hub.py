"""Data sets of the `datasets` library: an id of the Hub, or a copy saved with save_to_disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedvlm import hub
from fedvlm.data.sources import Arrow
from fedvlm.data.table import Dataset, tabulate
from fedvlm.errors import DataError, join_names

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
