"""The data sets of the papers: one entry each says what they are and what must be there."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.data.kinds import GROUP, call_reader, detect_kind, kinds
from fedvlm.data.sources import SourceSubset
from fedvlm.data.table import Dataset, normalise_unicode
from fedvlm.errors import DataError, SettingsError, join_names
from fedvlm.plugins import load_outside

PICTURE = ("a picture of a {}",)  # FedCLIP, FAA-CLIP, FedOT
PHOTO = ("a photo of a {}.",)  # CoOp, FedOTP, TOFA: with the full stop


@dataclass(frozen=True)
class Entry:
    """A data set: where to get it, how it is laid out, what must be in it, how papers use it."""

    name: str
    home: str  # where to get it, in words
    layout: str = "domain/class"  # of a folder or .zip of it; or "leaf"
    classes: tuple[str, ...] = ()  # in the order of the labels; empty: as found, sorted
    domains: Mapping[str, int] = field(default_factory=dict)  # with their rows; 0: not well known
    rows: int = 0  # images in all, if well known; from the domains if they have numbers
    templates: tuple[str, ...] = PICTURE
    hub: str = ""  # id on the Hugging Face Hub
    columns: Mapping[str, str] = field(default_factory=dict)  # image, label, ... of the Hub's copy
    split_file: str = ""  # of CoOp, in the folder
    aliases: Mapping[str, str] = field(default_factory=dict)  # other spellings of classes, domains
    without: tuple[str, ...] = ()  # classes on disk that the papers leave out
    subset: bool = False  # all classes on disk but the listed ones are left out
    place: str = ""  # where it is if nobody says
    protocol: str = ""  # what the papers do with it
    comment: str = ""

    @property
    def total(self) -> int:
        has_counts = all(self.domains.values())
        return self.rows or (sum(self.domains.values()) if has_counts else 0)

    @property
    def shape(self) -> str:
        """What a person should have on disk."""
        first = next(iter(self.domains), "DOMAIN").replace("/", " ")
        words = {"domain": first, "class": "CLASS", "split": "Training", "client": "CLIENT"}
        path = "/".join(words.get(word, "*") for word in self.layout.split("|")[0].split("/"))
        shapes = [f"a folder or .zip with {path}/IMAGE"] if path else []
        if self.split_file:
            shapes = [f"a folder with {self.split_file} and the images of it"]
        if self.layout == "leaf":
            shapes = ["the folder of LEAF's .json files"]
        if self.hub:
            shapes.append(f"hub:{self.hub}, or a folder that save_to_disk made of it")
        return ", or ".join(shapes)


_ENTRIES: dict[str, Entry] = {}


def add(entry: Entry) -> Entry:
    """Adds a data set to the catalogue, so that its name can be opened."""
    if _ENTRIES.setdefault(entry.name, entry) != entry:
        raise SettingsError(f"the name {entry.name!r} is taken by another data set of the catalogue; choose another")
    return entry


def catalogue() -> dict[str, Entry]:
    """All entries by name: the papers', which come with the package, and outside packages'."""
    from fedvlm.data import papers  # noqa: F401  adds them

    load_outside(GROUP)
    return dict(sorted(_ENTRIES.items()))


@cache
def class_names(name: str) -> tuple[str, ...]:
    """A long list of class names, in the order of the labels."""
    lists = json.loads((Path(__file__).parent / "classes.json").read_text(encoding="utf-8"))
    return tuple(lists[name])


def open_entry(entry: Entry, root: str | Path | None = None, check: bool = True) -> Dataset:
    """A data set of the catalogue from `root`: a path, or hub:ID; classes in the entry's order.

    With `check` the rows must be as many as are known to be in it; classes are always checked.
    """
    place = str(root) if root else entry.place
    if not place:
        raise DataError(f"{entry.name} is not shipped: get it from {entry.home}; then set root to {entry.shape}")
    kind_and_place = detect_kind(place)
    if kind_and_place is None:
        raise DataError(
            f"{place} is not there, so {entry.name} cannot be opened; set root to {entry.shape} "
            f"(to be had from {entry.home})"
        )
    data = _read(entry, *kind_and_place)
    return _check(entry, place, _arrange(entry, place, data), check)


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
    """A name without case, blanks, underscores and hyphens, in which copies differ."""
    return "".join(letter for letter in normalise_unicode(name).casefold() if letter.isalnum())


def _arrange(entry: Entry, place: str, data: Dataset) -> Dataset:
    """The entry's spelling and order of classes and domains, without what the papers leave out."""
    aliases = {_plain(alias): _plain(name) for alias, name in entry.aliases.items()}

    def plain(name: str) -> str:
        return aliases.get(_plain(name), _plain(name))

    excluded = {_plain(name) for name in entry.without}
    ordered = entry.classes or tuple(class_name for class_name in data.classes if _plain(class_name) not in excluded)
    number = {_plain(name): index for index, name in enumerate(ordered)}
    class_keys = [plain(name) for name in data.classes]
    strange = [
        name
        for name, key in zip(data.classes, class_keys, strict=True)
        if key not in number and _plain(name) not in excluded and not entry.subset
    ]
    missing = [name for name in ordered if _plain(name) not in class_keys]
    if strange or missing:
        problems = [f"it lacks {join_names(missing)}"] if missing else []
        problems += [f"it has {join_names(strange)} besides"] if strange else []
        raise DataError(
            f"the classes of {place} are not those of {entry.name} ({len(ordered)} classes): "
            f"{' and '.join(problems)}; get it from {entry.home}"
        )
    labels = np.array([number.get(key, -1) for key in class_keys], dtype=np.int64)[data.labels]
    selected = np.flatnonzero(labels >= 0)
    spelled = {_plain(name): name for name in entry.domains}
    domains = [spelled.get(plain(name), name) for name in data.domains[selected].tolist()]
    return replace(
        data,
        name=entry.name,
        classes=tuple(name.replace("_", " ") for name in ordered),
        source=SourceSubset(data.source, selected) if len(selected) < len(labels) else data.source,
        labels=labels[selected],
        domains=np.array(domains, dtype=np.str_),
        clients=data.clients[selected],
        splits=data.splits[selected],
        groups=None if data.groups is None else data.groups[selected],
        templates=entry.templates,
    )


def _check(entry: Entry, place: str, data: Dataset, rows: bool) -> Dataset:
    held = Counter(data.domains.tolist())
    if entry.domains and set(held) != set(entry.domains):
        raise DataError(
            f"the domains of {place} are {join_names(sorted(held))}, those of {entry.name} are "
            f"{join_names(list(entry.domains))}; set root to {entry.shape}"
        )
    if not rows:
        return data
    short = [
        f"{domain} has {held[domain]:,} of {expected:,}"
        for domain, expected in entry.domains.items()
        if expected and held[domain] != expected
    ]
    if entry.total and len(data.labels) != entry.total:
        short.append(f"{len(data.labels):,} of {entry.total:,} in all")
    if short:
        raise DataError(
            f"the images of {place} are not as many as are in {entry.name}: {'; '.join(short)}; "
            f"get it again from {entry.home}, or open it with check = false"
        )
    return data
