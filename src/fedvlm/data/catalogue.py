"""The data sets of the papers: one entry each says what they are and what must be there."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.data.kinds import GROUP, call, kind_of, kinds
from fedvlm.data.sources import Chosen
from fedvlm.data.table import Dataset, text
from fedvlm.errors import DataError, SettingsError, listing
from fedvlm.outside import load_outside

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
    note: str = ""

    @property
    def total(self) -> int:
        known = all(self.domains.values())
        return self.rows or (sum(self.domains.values()) if known else 0)

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
        raise SettingsError(
            f"the name {entry.name!r} is taken by another data set of the catalogue; choose another"
        )
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
        raise DataError(
            f"{entry.name} is not shipped: get it from {entry.home}; then set root to {entry.shape}"
        )
    found = kind_of(place)
    if found is None:
        raise DataError(
            f"{place} is not there, so {entry.name} cannot be opened; set root to {entry.shape} "
            f"(to be had from {entry.home})"
        )
    data = _read(entry, *found)
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
    return call(entry.name, kinds()[kind], place, options)


def _plain(name: str) -> str:
    """A name without case, blanks, underscores and hyphens, in which copies differ."""
    return "".join(letter for letter in text(name).casefold() if letter.isalnum())


def _arrange(entry: Entry, place: str, data: Dataset) -> Dataset:
    """The entry's spelling and order of classes and domains, without what the papers leave out."""
    other = {_plain(alias): _plain(name) for alias, name in entry.aliases.items()}

    def plain(name: str) -> str:
        return other.get(_plain(name), _plain(name))

    gone = {_plain(name) for name in entry.without}
    ordered = entry.classes or tuple(one for one in data.classes if _plain(one) not in gone)
    number = {_plain(name): index for index, name in enumerate(ordered)}
    found = [plain(name) for name in data.classes]
    strange = [
        name
        for name, key in zip(data.classes, found, strict=True)
        if key not in number and _plain(name) not in gone and not entry.subset
    ]
    missing = [name for name in ordered if _plain(name) not in found]
    if strange or missing:
        says = [f"it lacks {listing(missing)}"] if missing else []
        says += [f"it has {listing(strange)} besides"] if strange else []
        raise DataError(
            f"the classes of {place} are not those of {entry.name} ({len(ordered)} classes): "
            f"{' and '.join(says)}; get it from {entry.home}"
        )
    labels = np.array([number.get(key, -1) for key in found], dtype=np.int64)[data.labels]
    kept = np.flatnonzero(labels >= 0)
    spelled = {_plain(name): name for name in entry.domains}
    domains = [spelled.get(plain(name), name) for name in data.domains[kept].tolist()]
    return replace(
        data,
        name=entry.name,
        classes=tuple(name.replace("_", " ") for name in ordered),
        source=Chosen(data.source, kept) if len(kept) < len(labels) else data.source,
        labels=labels[kept],
        domains=np.array(domains, dtype=np.str_),
        clients=data.clients[kept],
        splits=data.splits[kept],
        groups=None if data.groups is None else data.groups[kept],
        templates=entry.templates,
    )


def _check(entry: Entry, place: str, data: Dataset, rows: bool) -> Dataset:
    held = Counter(data.domains.tolist())
    if entry.domains and set(held) != set(entry.domains):
        raise DataError(
            f"the domains of {place} are {listing(sorted(held))}, those of {entry.name} are "
            f"{listing(list(entry.domains))}; set root to {entry.shape}"
        )
    if not rows:
        return data
    short = [
        f"{domain} has {held[domain]:,} of {known:,}"
        for domain, known in entry.domains.items()
        if known and held[domain] != known
    ]
    if entry.total and len(data.labels) != entry.total:
        short.append(f"{len(data.labels):,} of {entry.total:,} in all")
    if short:
        raise DataError(
            f"the images of {place} are not as many as are in {entry.name}: {'; '.join(short)}; "
            f"get it again from {entry.home}, or open it with check = false"
        )
    return data
