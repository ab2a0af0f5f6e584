"""What a data set is: before the encoder a table of images, after it a table of embeddings."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, overload
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.errors import DataError, join_names

if TYPE_CHECKING:
    from fedvlm.core import LazyRows
    from fedvlm.maths.image_tower import ImageTower
    from fedvlm.maths.text_tower import TextTower

Strings = NDArray[np.str_]
SPLIT_ALIASES = {  # the words people use for the three parts
    "": "",
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}


class Digests(Sequence[str]):
    """Hex digests of many rows as an array of their bytes: a fifth of what words would take."""

    def __init__(self, raw: bytes | bytearray) -> None:
        self.raw = np.frombuffer(raw, "S32")  # one of 32 bytes that ends in zeros is told apart

    def __len__(self) -> int:
        return len(self.raw)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[index] for index in range(len(self))[row]]
        return bytes(self.raw[row]).ljust(32, b"\0").hex()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def rank_digests(content: Sequence[str]) -> NDArray[np.int64]:
    """(rows,) numbers that are equal and in order where the digests are."""
    if not isinstance(content, Digests):
        words = np.asarray(content, dtype=np.str_)
        return np.asarray(np.unique(words, return_inverse=True)[1], np.int64).reshape(-1)
    columns = content.raw.view(">u8").reshape(len(content), -1).T  # sorted so, they take less room
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(content), np.bool_)
    for column in columns:
        column = column[order]
        new[1:] |= column[1:] != column[:-1]
    out = np.empty(len(content), np.int64)
    out[order] = np.cumsum(new)
    return out


def sort_order(content: NDArray[np.int64], *columns: NDArray[Any]) -> NDArray[np.int64]:
    """(rows,) their order by content, and by the columns where that is the same."""
    if content.max(initial=-1) + 1 < len(content):
        return np.lexsort([*reversed(columns), content])
    order = np.empty_like(content)  # no two alike: their ranks are the order
    order[content] = np.arange(len(content))
    return order


def unique_with_inverse(words: Strings) -> tuple[Strings, NDArray[np.int64]]:
    """The different ones in order, and (rows,) which of them each is.

    Looked up afterwards: the inverse that numpy's `unique` gives takes three copies of the words.
    """
    unique_words = np.unique(words)
    return unique_words, np.searchsorted(unique_words, words)


class Source(Protocol):
    """Where the bytes of the images are: files, members of an archive, rows of an Arrow table."""

    def __len__(self) -> int: ...

    def name(self, row: int) -> str:
        """How a person finds this image again."""
        ...

    def read(self, row: int) -> bytes:
        """The encoded image (PNG, JPEG, ...), not decoded."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Images with labels. Empty strings mean that a column says nothing about a row."""

    name: str
    classes: tuple[str, ...]  # in the order of the label ids, as a template wants them
    source: Source
    labels: NDArray[np.int64]  # (rows,)
    domains: Strings  # (rows,)
    clients: Strings  # (rows,) the data's own clients (writers, sites), or empty strings
    splits: Strings  # (rows,) "train", "validation", "test" where the data set says so, or empty
    templates: tuple[str, ...] = ("a picture of a {}",)
    groups: Strings | None = None  # (rows,) what stays in one part: a patient, a lesion
    notes: tuple[str, ...] = ()  # what was passed over on the way


@dataclass(frozen=True, repr=False)
class EmbeddedTable:
    """The same rows as a method's world sees them: unit-norm embeddings and no images."""

    name: str
    classes: tuple[str, ...]
    x: Tensor  # (rows, dim) float32, unit norm
    labels: NDArray[np.int64]  # (rows,)
    domains: Strings
    clients: Strings
    splits: Strings
    content: Sequence[str]  # (rows,) hex digests: equal digests are the same image
    scale: float  # the encoder's logit scale (100 for released CLIP)
    text: Tensor | None  # (classes, dim) unit-norm class text embeddings, if the encoder has them
    patches: "Tensor | LazyRows | None"  # (rows, patches, dim) float16, memory-mapped, if asked for
    encoder: str  # the encoder's name and fingerprint
    fingerprint: str  # of the rows: images, labels, classes, templates
    text_tower: "TextTower | None" = None
    image_tower: "ImageTower | None" = None
    images: "LazyRows | None" = None  # (rows, 3, height, width) as the image tower takes them
    descriptions: Tensor | None = None  # (classes, texts, dim) zeros where a class has fewer
    texts: Mapping[str, Tensor] = field(default_factory=dict)  # the same, by client that brings it
    groups: Strings | None = None  # (rows,) what stays in one part: a patient, a lesion

    def __repr__(self) -> str:
        rows, dim = self.x.shape
        return f"<{self.name}: {rows} rows of {dim}, {len(self.classes)} classes, {self.encoder}>"

    def offers(self) -> set[str]:
        """What these rows can give a method."""
        available = {
            "image": self.x,
            "text": self.text,
            "patches": self.patches,
            "text tower": self.text_tower,
            "image tower": None if self.images is None else self.image_tower,
        }
        return {capability for capability, value in available.items() if value is not None}

    def view(self, needs: Collection[str]) -> "Tensor | LazyRows":
        """The rows as a method of these needs sees them."""
        if "image tower" in needs:
            assert self.images is not None
            return self.images
        if "patches" in needs:
            assert self.patches is not None
            return self.patches
        return self.x


def to_nfc(name: str) -> str:
    """A name in one Unicode form, so that it is the same name on every file system."""
    return normalize("NFC", name)


def tabulate(
    name: str,
    source: Source,
    labels: Sequence[str],
    classes: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
    clients: Sequence[str] | None = None,
    splits: Sequence[str] | None = None,
) -> Dataset:
    """A data set from one class name per row; without `classes` they are sorted by name.

    A class without rows and a label that is no class are refused, and so are, where no list of
    classes is given, names that differ only in case.
    """
    rows = [to_nfc(label) for label in labels]
    if not rows:
        raise DataError(f"{name} has no images; name a place that has some")
    if "" in rows:
        raise DataError(f"{name}: {source.name(rows.index(''))} has no label; give it one")
    ordered = [to_nfc(class_name) for class_name in classes] if classes is not None else sort_class_names(rows)
    if classes is None:  # a list may tell A from a, as FEMNIST's does; names that happen may not
        check_case_collisions(name, ordered)
    number = {class_name: index for index, class_name in enumerate(ordered)}
    if len(number) < len(ordered):
        twice = next(class_name for class_name in ordered if ordered.count(class_name) > 1)
        raise DataError(f"{name}: the class {twice!r} is listed twice; list every class once")
    for row, label in enumerate(rows):
        if label not in number:
            raise DataError(
                f"{name}: {source.name(row)} has the label {label!r}, which is no class; the "
                f"classes are {join_names(ordered)}"
            )
    if empty := sorted(set(ordered) - set(rows)):
        raise DataError(f"{name}: class {empty[0]!r} has no images; add some or leave the class out")
    return Dataset(
        name=name,
        classes=tuple(class_name.replace("_", " ") for class_name in ordered),
        source=source,
        labels=np.array([number[label] for label in rows], dtype=np.int64),
        domains=string_column(domains, len(rows)),
        clients=string_column(clients, len(rows)),
        splits=split_column(name, source, splits, len(rows)),
    )


def sort_class_names(names: Iterable[str]) -> list[str]:
    """The different names, sorted; whole numbers by their value, so that 2 comes before 10."""
    unique = set(names)
    if all(name.isdecimal() for name in unique):
        return sorted(unique, key=int)
    return sorted(unique)


def check_case_collisions(name: str, classes: Sequence[str]) -> None:
    """Refuses classes that are one class on some file systems and two on others."""
    spelling_of: dict[str, str] = {}
    for class_name in classes:
        key = class_name.replace("_", " ").casefold()
        if key in spelling_of:
            raise DataError(
                f"{name}: the classes {spelling_of[key]!r} and {class_name!r} differ only in case or blanks; "
                "give them one spelling"
            )
        spelling_of[key] = class_name


def string_column(values: Sequence[str] | None, rows: int) -> Strings:
    return np.array([to_nfc(value) for value in values or [""] * rows], dtype=np.str_)


def anonymise_groups(groups: Sequence[str]) -> Strings:
    """Groups by number: who a patient is gets into no record, fingerprint or message."""
    number = {name: str(index) for index, name in enumerate(dict.fromkeys(filter(None, groups)))}
    return string_column([number.get(name, "") for name in groups], len(groups))


def split_column(name: str, source: Source, values: Sequence[str] | None, rows: int) -> Strings:
    words = [value.strip().lower() for value in values or [""] * rows]
    for row, word in enumerate(words):
        if word not in SPLIT_ALIASES:
            raise DataError(
                f"{name}: {source.name(row)} is in the split {word!r}; a split is train, validation or test"
            )
    return np.array([SPLIT_ALIASES[word] for word in words], dtype=np.str_)


def readable_name(name: str) -> str:
    """`Alarm_Clock` as it would be said: "alarm clock"; camelCase is left alone but for case."""
    return " ".join(name.replace("_", " ").split()).lower()


def match_classes(names: Sequence[str], classes: Sequence[str]) -> list[int]:
    """The number of the class that each name is, -1 for none; case only tells two classes apart."""
    exact = {to_nfc(name).replace("_", " "): index for index, name in enumerate(classes)}
    loose = {name.casefold(): index for name, index in exact.items()}
    normalised = [to_nfc(name).replace("_", " ") for name in names]
    return [exact.get(name, loose.get(name.casefold(), -1)) for name in normalised]
