"""Data sets, splits, few-shot and the federation made of them."""

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedvlm.data import catalogue
from fedvlm.data.catalogue import Entry, add
from fedvlm.data.clients import Clients
from fedvlm.data.partition import list_samples, make_partition
from fedvlm.data.readers import call_reader, detect_kind, kinds, register
from fedvlm.data.sources import EightBitSource, Window, check_window
from fedvlm.data.table import Dataset, Source, tabulate
from fedvlm.errors import DataError, SettingsError, suggest_path, unknown_name

__all__ = [
    "Clients",
    "Dataset",
    "Entry",
    "Source",
    "add",
    "kinds",
    "list_samples",
    "make_partition",
    "open_dataset",
    "register",
    "tabulate",
]


def open_dataset(name: str, **options: Any) -> Dataset:
    """A data set by name: `demo`, a name of the catalogue, `folder:DIR`, `manifest:FILE`,
    `hub:ID_OR_DIR`, `coop:JSON`, `leaf:DIR`, or a path whose kind can be told.

    Options are those of the reader: `root` for the catalogue, `layout` for folders, and so on;
    `window` is what is black and what is white in images of 16 bits and DICOM.
    """
    window = check_window(options.pop("window", None))
    if name in (entries := catalogue.catalogue()):
        return _as_eight_bit(call_reader(name, catalogue.open_entry, entries[name], options), window)
    if (kind_and_place := detect_kind(name)) is not None:
        kind, place = kind_and_place
        return _as_eight_bit(call_reader(kind, kinds()[kind], place, options), window)
    written = [f"{kind}:..." for kind in kinds()]
    if name.startswith("store:"):
        raise DataError(f"embeddings take the place of data and encoder; write --encoder {name}")
    path_meant = suggest_path(Path(name)) and not get_close_matches(name, entries)
    if "/" in name or "." in name or path_meant:
        raise DataError(
            f"there is no {name}; {suggest_path(Path(name))}name a folder, a .zip, a manifest, "
            f"a data set of the catalogue, or one of {', '.join(written)}"
        )
    refusal = unknown_name("data set", name, [*entries, *written])
    raise SettingsError(f"the path {name} does not exist, and {refusal}")


def _as_eight_bit(dataset: Dataset, window: Window | None) -> Dataset:
    return replace(dataset, source=EightBitSource(dataset.source, window))
