"""The catalogue of data sets: one entry says where to get a data set, how it is laid out and what must be in it."""

import json
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.data.readers import GROUP, call_reader, detect_kind, kinds
from fedvlm.data.sources import SourceSubset
from fedvlm.data.table import Dataset, relabel, select_columns, to_nfc
from fedvlm.errors import DataError, SettingsError, join_names
from fedvlm.plugins import load_outside

FOLDER = Path(__file__).parent
PICTURE = ("a picture of a {}",)  # FedCLIP, FAA-CLIP, FedOT
PHOTO = ("a photo of a {}.",)  # CoOp, FedOTP, TOFA: with the full stop


@dataclass(frozen=True)
class Entry:
    """A data set: where to get it, its layout, what must be in it, and how papers use it."""

    name: str
    home: str  # where to get it, in words
    layout: str = "domain/class"  # of its folder or .zip; or "leaf"
    classes: tuple[str, ...] = ()  # in the order of the labels; empty: sorted as found
    domains: Mapping[str, int] = field(default_factory=dict)  # with their number of images; 0: not well known
    rows: int = 0  # images in all, if well known; by default the sum over the domains
    templates: tuple[str, ...] = PICTURE
    hub: str = ""  # id on the Hugging Face Hub
    columns: Mapping[str, str] = field(default_factory=dict)  # image, label, ... of the copy on the Hub
    split_file: str = ""  # of CoOp, in the folder
    aliases: Mapping[str, str] = field(default_factory=dict)  # other spellings of classes and domains
    without: tuple[str, ...] = ()  # classes on disk that the papers leave out
    subset: bool = False  # all classes on disk except the listed ones are left out
    place: str = ""  # default root
    protocol: str = ""  # what the papers do with it
    comment: str = ""

    @property
    def total(self) -> int:
        return self.rows or (sum(self.domains.values()) if all(self.domains.values()) else 0)

    @property
    def shape(self) -> str:
        """Describe the files that must be on disk."""
        first = next(iter(self.domains), "DOMAIN").replace("/", " ")
        words = {"domain": first, "class": "CLASS", "split": "Training", "client": "CLIENT"}
        path = "/".join(words.get(word, "*") for word in self.layout.split("|")[0].split("/"))
        shapes = [f"a folder or .zip with {path}/IMAGE"] if path else []
        if self.split_file:
            shapes = [f"a folder with {self.split_file} and its images"]
        if self.layout == "leaf":
            shapes = ["the folder of LEAF's .json files"]
        if self.hub:
            shapes.append(f"hub:{self.hub}, or a folder that save_to_disk made of it")
        return ", or ".join(shapes)


_ENTRIES: dict[str, Entry] = {}


def add(entry: Entry) -> Entry:
    """Add a data set to the catalogue, so that it can be opened by its name."""
    if _ENTRIES.setdefault(entry.name, entry) != entry:
        raise SettingsError(f"the name {entry.name!r} is taken by another data set of the catalogue; choose another")
    return entry


def catalogue() -> dict[str, Entry]:
    """Return all entries by name: those of catalogue.toml, and those of outside packages."""
    _read_catalogue()
    load_outside(GROUP)
    return dict(sorted(_ENTRIES.items()))


@cache
def _read_catalogue() -> None:
    for name, fields in tomllib.loads((FOLDER / "catalogue.toml").read_text(encoding="utf-8")).items():
        templates = fields.get("templates", "picture")
        fields["templates"] = {"picture": PICTURE, "photo": PHOTO}[templates] if type(templates) is str else templates
        fields["classes"] = class_names(fields.get("classes", name))
        if "place" in fields:
            fields["place"] = str(FOLDER / fields["place"])
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        add(Entry(name, **arguments))


@cache
def class_names(name: str) -> tuple[str, ...]:
    """Read a list of class names of classes.json, in the order of the labels."""
    return tuple(json.loads((FOLDER / "classes.json").read_text(encoding="utf-8"))[name])


def open_entry(entry: Entry, root: str | Path | None = None, check: bool = True) -> Dataset:
    """Open a data set of the catalogue from `root`, a path or hub:ID; classes come in the entry's order.

    `check` compares the number of images with the known one; classes are always checked.
    """
    place = str(root) if root else entry.place
    if not place:
        raise DataError(f"{entry.name} is not shipped: get it from {entry.home}; then set root to {entry.shape}")
    kind_and_place = detect_kind(place)
    if kind_and_place is None:
        where = f"set root to {entry.shape} (available from {entry.home})"
        raise DataError(f"{place} is not there, so {entry.name} cannot be opened; {where}")
    data = _arrange(entry, place, _read(entry, *kind_and_place))
    counts = Counter(data.domains.tolist())
    if entry.domains and set(counts) != set(entry.domains):
        expected = f"those of {entry.name} are {join_names(list(entry.domains))}"
        problem = f"the domains of {place} are {join_names(sorted(counts))}, {expected}"
        raise DataError(f"{problem}; set root to {entry.shape}")
    if check:
        _check_counts(entry, place, counts)
    return data


def _read(entry: Entry, kind: str, place: str) -> Dataset:
    options: dict[str, Any] = {}
    split = Path(place) / entry.split_file
    if entry.split_file and kind in ("folder", "leaf") and split.is_file():
        kind, place = "coop", str(split)
    elif kind == "folder" and entry.layout != "leaf":
        options["layout"] = entry.layout
    elif kind == "hub":
        options = dict(entry.columns)
    return call_reader(entry.name, kinds()[kind], place, options)


def _plain(name: str) -> str:
    """Drop case, blanks, underscores and hyphens, in which copies differ."""
    return "".join(letter for letter in to_nfc(name).casefold() if letter.isalnum())


def _arrange(entry: Entry, place: str, data: Dataset) -> Dataset:
    """Spell and order classes and domains as the entry does; drop what the papers leave out."""
    aliases = {_plain(alias): _plain(name) for alias, name in entry.aliases.items()}

    def plain(name: str) -> str:
        return aliases.get(_plain(name), _plain(name))

    excluded = {_plain(name) for name in entry.without}
    ordered = entry.classes or tuple(name for name in data.classes if _plain(name) not in excluded)
    number = {_plain(name): index for index, name in enumerate(ordered)}
    class_keys = [plain(name) for name in data.classes]
    pairs = [] if entry.subset else zip(data.classes, class_keys, strict=True)
    extra = [name for name, key in pairs if key not in number and _plain(name) not in excluded]
    missing = [name for name in ordered if _plain(name) not in class_keys]
    if extra or missing:
        problems = [f"it lacks {join_names(missing)}"] if missing else []
        problems += [f"it also has {join_names(extra)}"] if extra else []
        expected = f"those of {entry.name} ({len(ordered)} classes): {' and '.join(problems)}"
        raise DataError(f"the classes of {place} are not {expected}; get it from {entry.home}")
    labels = relabel(data.labels, np.array([number.get(key, -1) for key in class_keys], dtype=np.int64))
    selected = np.flatnonzero(labels >= 0)
    spelled = {_plain(name): name for name in entry.domains}
    domains = [spelled.get(plain(name), name) for name in data.domains[selected].tolist()]
    return replace(
        data,
        name=entry.name,
        classes=tuple(name.replace("_", " ") for name in ordered),
        source=SourceSubset(data.source, selected) if len(selected) < len(labels) else data.source,
        templates=entry.templates,
        **(select_columns(data, selected) | {"labels": labels[selected], "domains": np.array(domains, dtype=np.str_)}),
    )


def _check_counts(entry: Entry, place: str, counts: Counter[str]) -> None:
    wrong = {domain: n for domain, n in entry.domains.items() if n and counts[domain] != n}
    problems = [f"{domain} has {counts[domain]:,} of {n:,}" for domain, n in wrong.items()]
    if entry.total and counts.total() != entry.total:
        problems.append(f"{counts.total():,} of {entry.total:,} in all")
    if problems:
        problem = f"{place} has another number of images than {entry.name}: {'; '.join(problems)}"
        raise DataError(f"{problem}; get it again from {entry.home}, or open it with check = false")
