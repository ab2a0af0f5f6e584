"""The kinds of data a person may point at, and how a kind is told from a path."""

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from fedvlm.data import folders, hub, leaf, manifests
from fedvlm.data.table import Dataset
from fedvlm.errors import DataError, SettingsError, unknown_name
from fedvlm.plugins import add_entry, load_outside

GROUP = "fedvlm.data"
Reader = Callable[..., Dataset]  # of a place, and of options by name
READERS: dict[str, Reader] = {  # by what stands before the colon
    "folder": folders.read_folder,
    "manifest": manifests.read_manifest,
    "hub": hub.read_hub,
    "coop": manifests.read_coop,
    "leaf": leaf.read_leaf,
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
        if hub.is_saved(path):
            return "hub", name
        return ("leaf" if leaf.is_leaf(path) else "folder"), name
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
