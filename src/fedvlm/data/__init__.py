"""Read data sets, split them and partition them among clients."""

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedvlm.data import catalogue
from fedvlm.data.catalogue import Entry, add
from fedvlm.data.clients import Clients
from fedvlm.data.partition import list_samples, make_partition
from fedvlm.data.readers import call_reader, detect_kind, kinds, register
from fedvlm.data.sources import EightBitSource, check_window
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
    """Open a data set: `demo`, a name of the catalogue, `folder:DIR`, `manifest:FILE`, `hub:ID_OR_DIR`, `coop:JSON`,
    `leaf:DIR`, or a path whose kind can be detected.

    Options are those of the reader: `root` for the catalogue, `layout` for folders, and so on; `window` are the values
    shown as black and as white in images of 16 bits and DICOM.
    """
    window = check_window(options.pop("window", None))
    if name in (entries := catalogue.catalogue()):
        dataset = call_reader(name, catalogue.open_entry, entries[name], options)
    elif (kind_and_place := detect_kind(name)) is not None:
        kind, place = kind_and_place
        dataset = call_reader(kind, kinds()[kind], place, options)
    else:
        raise _not_found(name, entries)
    return replace(dataset, source=EightBitSource(dataset.source, window))


def _not_found(name: str, entries: dict[str, Entry]) -> DataError | SettingsError:
    if name.startswith("store:"):
        return DataError(f"{name} holds embeddings, which replace data and encoder; write --encoder {name}")
    forms = [f"{kind}:..." for kind in kinds()]
    suggestion = suggest_path(Path(name))
    if "/" in name or "." in name or (suggestion and not get_close_matches(name, entries)):
        remedy = f"name a folder, a .zip, a manifest, a data set of the catalogue, or one of {', '.join(forms)}"
        return DataError(f"there is no file or folder {name}; {suggestion}{remedy}")
    unknown = unknown_name("data set", name, [*entries, *forms])
    return SettingsError(f"there is no file or folder {name!r}, and {unknown}")
