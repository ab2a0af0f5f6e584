"""A data set before the encoder (a table of images) and after it (a table of embeddings)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol, overload
from unicodedata import normalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.data.splits import Strings, read_splits
from fedvlm.errors import DataError, join_names

if TYPE_CHECKING:
    from fedvlm.core import LazyRows
    from fedvlm.maths.image_tower import ImageTower
    from fedvlm.maths.text_tower import TextTower


UNLABELLED = -1  # the label of a sample that has none
UNLABELLED_FOLDER = "unlabelled"


class Digests(Sequence[str]):
    """Hex digests of many samples as an array of bytes: a fifth of the memory of strings."""

    def __init__(self, raw: bytes | bytearray) -> None:
        self.raw = np.frombuffer(raw, "S32")  # trailing zero bytes, which numpy strips, are put back when read

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
    """(samples,) the rank of each digest; equal digests have equal ranks."""
    if not isinstance(content, Digests):
        words = np.asarray(content, dtype=np.str_)
        return np.asarray(np.unique(words, return_inverse=True)[1], np.int64).reshape(-1)
    columns = content.raw.view(">u8").reshape(len(content), -1).T  # sorting words of 8 bytes takes less memory
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(content), np.bool_)
    for column in columns:
        column = column[order]
        new[1:] |= column[1:] != column[:-1]
    out = np.empty(len(content), np.int64)
    out[order] = np.cumsum(new)
    return out


def sort_order(content: NDArray[np.int64], *columns: NDArray[Any]) -> NDArray[np.int64]:
    """(samples,) the order by content, and by the columns where the content is equal."""
    if content.max(initial=-1) + 1 < len(content):
        return np.lexsort([*reversed(columns), content])
    order = np.empty_like(content)  # all different: the ranks are the order
    order[content] = np.arange(len(content))
    return order


def unique_with_inverse(words: Strings) -> tuple[Strings, NDArray[np.int64]]:
    """Return the unique words in order, and (samples,) the index of each word among them.

    `np.unique(return_inverse=True)` would take three copies of the words.
    """
    unique_words = np.unique(words)
    return unique_words, np.searchsorted(unique_words, words)


FINDING_TEMPLATES = ("an image with {}",)
NEGATIVE_TEMPLATES = ("an image without {}",)
Findings = NDArray[np.int8]
"""(patterns, findings): 1 present, 0 absent, -1 unknown. A label is the row of its pattern, so that a table has one
label per sample however many findings an image has."""


def encode_findings(context: str, matrix: NDArray[Any], classes: Sequence[str]) -> tuple[NDArray[np.int64], Findings]:
    """Return labels and patterns of a matrix (samples, findings) of 0, 1 and NaN or -1 for unknown."""
    values = np.asarray(matrix, np.float64)
    values = np.where(np.isnan(values), -1, values)
    if wrong := sorted(set(np.unique(values).tolist()) - {-1, 0, 1}):
        raise DataError(f"{context}: a finding is {wrong[0]:g}; it must be 1 (present), 0 (absent) or NaN (unknown)")
    if values.shape[1] != len(classes):
        raise DataError(f"{context}: labels have {values.shape[1]} columns and there are {len(classes)} findings")
    for number, name in enumerate(classes):
        if not (values[:, number] >= 0).any():
            raise DataError(f"{context}: the finding {name!r} is unknown for every image; leave it out")
    patterns, labels = np.unique(values.astype(np.int8), axis=0, return_inverse=True)
    return np.asarray(labels, np.int64).reshape(-1), patterns


def pattern_names(findings: Findings, classes: Sequence[str]) -> tuple[str, ...]:
    """Name each pattern by its findings, as `edema|effusion`; unknown ones have a question mark."""
    marks = {1: "{}", -1: "{}?"}
    named = [[marks[v].format(name) for v, name in zip(row, classes, strict=True) if v] for row in findings.tolist()]
    return tuple("|".join(names) or "no finding" for names in named)


def align_labels(table: Any, number: Sequence[int], n_classes: int) -> dict[str, Any]:
    """Return the labels of a table by other class numbers, given those of its own; findings it lacks are unknown."""
    if table.findings is None:
        return {"labels": relabel(table.labels, np.array(number, np.int64))}
    findings = np.full((len(table.findings), n_classes), -1, np.int8)
    findings[:, number] = table.findings
    return {"findings": findings}


def check_same_kind(context: str, findings: Findings | None, multi_label: bool) -> None:
    """Refuse data of one class per image where several findings are expected, and the other way round."""
    if (findings is not None) != multi_label:
        kinds = ("one class per image", "several findings per image")
        raise DataError(f"{context} has {kinds[not multi_label]}, and {kinds[multi_label]} is needed; label it so")


def count_classes(table: Any, rows: Any) -> NDArray[np.int64]:
    """(classes,) count some samples of a table by class, or those with each finding."""
    labels = table.labels[rows]
    labels = labels[labels != UNLABELLED]
    if table.findings is None:
        return np.bincount(labels, minlength=len(table.classes))
    return np.asarray((table.findings[labels] == 1).sum(0), np.int64)


class Source(Protocol):
    """Where the bytes of images come from: files, members of an archive, rows of an Arrow table."""

    def __len__(self) -> int: ...

    def name(self, row: int) -> str:
        """The path or address under which a person finds the image."""
        ...

    def read(self, row: int) -> bytes:
        """The encoded image (PNG, JPEG, ...), not decoded."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Images with labels. An empty string in a column means unknown."""

    name: str
    classes: tuple[str, ...]  # in the order of the labels, spelled as in a prompt
    source: Source
    labels: NDArray[np.int64]  # (samples,) class numbers, or UNLABELLED
    domains: Strings  # (samples,)
    clients: Strings  # (samples,) the data's own clients (writers, sites)
    splits: Strings  # (samples,) one of SPLITS where the data set defines it
    templates: tuple[str, ...] = ("a picture of a {}",)
    groups: Strings | None = None  # (samples,) what must stay in one split: a patient, a lesion
    subgroups: Mapping[str, Strings] = field(default_factory=dict)  # (samples,) further columns, as sex or scanner
    notes: tuple[str, ...] = ()  # warnings of the reader, such as files it ignored
    findings: "Findings | None" = None  # of data with several findings per image: what the labels mean
    negative_templates: tuple[str, ...] = NEGATIVE_TEMPLATES  # of images without a finding


@dataclass(frozen=True, repr=False)
class EmbeddedTable:
    """The samples as a method uses them: unit-norm embeddings without images."""

    name: str
    classes: tuple[str, ...]
    x: Tensor  # (samples, dim) float32, unit norm
    labels: NDArray[np.int64]  # (samples,) class numbers, or UNLABELLED
    domains: Strings
    clients: Strings
    splits: Strings
    content: Sequence[str]  # (samples,) hex digests: equal digests are the same image
    scale: float  # the encoder's logit scale (100 for released CLIP)
    text: Tensor | None  # (classes, dim) unit-norm class text embeddings, if the encoder has them
    patches: "Tensor | LazyRows | None"  # (samples, patches, dim) float16, memory-mapped, if requested
    encoder: str  # name and fingerprint of the encoder
    fingerprint: str  # of the samples: images, labels, classes, templates
    text_tower: "TextTower | None" = None
    image_tower: "ImageTower | None" = None
    images: "LazyRows | None" = None  # (samples, 3, height, width) as the image tower takes them
    descriptions: Tensor | None = None  # (classes, texts, dim) zeros where a class has fewer
    texts: Mapping[str, Tensor] = field(default_factory=dict)  # the same by client that provides them
    groups: Strings | None = None  # (samples,) what must stay in one split: a patient, a lesion
    subgroups: Mapping[str, Strings] = field(default_factory=dict)  # (samples,) further columns, as sex or scanner
    findings: "Findings | None" = None  # of data with several findings per image: what the labels mean
    negative_text: Tensor | None = None  # (classes, dim) unit-norm embeddings of "without the finding"
    test_data: "Mapping[str, EmbeddedTable]" = field(default_factory=dict)  # cross-data-set: others, only tested on

    def __repr__(self) -> str:
        samples, dim = self.x.shape
        return f"<{self.name}: {samples} samples of {dim}, {len(self.classes)} classes, {self.encoder}>"

    def offers(self) -> set[str]:
        """Return which needs of methods these samples meet."""
        towers = {"text tower": self.text_tower, "image tower": None if self.images is None else self.image_tower}
        available = {"image": self.x, "text": self.text, "patches": self.patches, **towers}
        return {capability for capability, value in available.items() if value is not None}

    def view(self, needs: Collection[str]) -> "Tensor | LazyRows":
        """Return the representation that a method with these needs trains on."""
        if "image tower" in needs:
            assert self.images is not None
            return self.images
        if "patches" in needs:
            assert self.patches is not None
            return self.patches
        return self.x

    def select(self, rows: NDArray[np.int64], **changes: Any) -> "EmbeddedTable":
        """Return some of the samples, in the given order; `changes` are fields to replace."""
        return replace(
            self,
            x=self.x[rows],
            content=[self.content[row] for row in rows.tolist()],
            patches=None if self.patches is None else self.patches[rows],
            images=None if self.images is None else self.images.take(torch.from_numpy(rows)),
            **(select_columns(self, rows) | changes),
        )


def with_test_data(table: EmbeddedTable, others: Mapping[str, EmbeddedTable]) -> EmbeddedTable:
    """Return a table with other data sets to test on, by the names that the setting test_data gives them."""
    prints = [table.fingerprint, *(f"{name} {other.fingerprint}" for name, other in others.items())]
    return replace(table, test_data=dict(others), fingerprint=sha256("\x1f".join(prints).encode()).hexdigest())


def select_columns(table: Dataset | EmbeddedTable, rows: NDArray[np.int64]) -> dict[str, Any]:
    """Return the columns of some samples."""
    names = ("labels", "domains", "clients", "splits", "groups")
    columns = {key: getattr(table, key)[rows] for key in names if getattr(table, key) is not None}
    return columns | {"subgroups": {key: column[rows] for key, column in table.subgroups.items()}}


def to_nfc(name: str) -> str:
    """Return a name in one Unicode form, which is the same on every file system."""
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
    """Make a data set from one class name per image, empty without a label; without `classes` they are sorted by name.

    A class without images and a label that is no class are refused, and without `classes` also names that differ
    only in case.
    """
    row_names = [to_nfc(label) for label in labels]
    if not row_names:
        raise DataError(f"{name} has no images; name a place that has some")
    used = set(row_names) - {""}
    if not used:
        raise DataError(f"{name}: no image has a label, as {source.name(0)}; give some of them one")
    ordered = [to_nfc(class_name) for class_name in classes] if classes is not None else sort_class_names(used)
    if classes is None:  # a list may have A and a, as FEMNIST's has; folder names may not
        _check_case_collisions(name, ordered)
    check_class_names(name, [class_name.replace("_", " ") for class_name in ordered])
    number = {"": UNLABELLED} | {class_name: index for index, class_name in enumerate(ordered)}
    for row, label in enumerate(row_names):
        if label not in number:
            owner, known = source.name(row), join_names(ordered)
            raise DataError(f"{name}: {owner} has the label {label!r}, which is no class; the classes are {known}")
    if empty := sorted(set(ordered) - used):
        raise DataError(f"{name}: class {empty[0]!r} has no images; add some or leave the class out")
    return Dataset(
        name=name,
        classes=tuple(class_name.replace("_", " ") for class_name in ordered),
        source=source,
        labels=np.array([number[label] for label in row_names], dtype=np.int64),
        domains=string_column(domains, len(row_names)),
        clients=string_column(clients, len(row_names)),
        splits=read_splits(name, splits or [""] * len(row_names), source.name),
    )


def sort_class_names(names: Iterable[str]) -> list[str]:
    """Return the unique names, sorted; whole numbers by value, so that 2 comes before 10."""
    unique = set(names)
    return sorted(unique, key=int) if all(name.isdecimal() for name in unique) else sorted(unique)


def check_class_names(context: str, names: Sequence[str]) -> None:
    """Refuse an empty name, a name that two classes have, and the name of the folder of images without a label."""
    if not all(name.strip() for name in names):
        number = next(index for index, name in enumerate(names) if not name.strip())
        raise DataError(f"{context}: a class has an empty name (class {number} is {names[number]!r}); name it")
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise DataError(f"{context}: the class {twice!r} is listed twice; list every class once")
    if reserved := [name for name in names if name.casefold() == UNLABELLED_FOLDER]:
        reason = "because images in a folder of this name have no label"
        raise DataError(f"{context}: {reserved[0]!r} cannot be a class, {reason}; rename the class")


def check_scale(context: str, scale: float) -> float:
    """Refuse a logit scale that is not a positive number."""
    if not (isfinite(scale) and scale > 0):
        raise DataError(f"{context}: scale must be a number above 0, got {scale:g}")
    return float(scale)


def describe_bad_row(values: Tensor) -> str:
    """Say why an embedding (dim,) has no direction in float32."""
    exact = values.double()
    if not exact.isfinite().all():
        return "holds NaN or infinity"
    largest = float(exact[exact.abs().argmax()])
    if largest == 0:
        return "is zero"
    if abs(largest) > torch.finfo(torch.float32).max:
        return f"holds {largest:g}, beyond the range of float32"
    return f"has a norm beyond the range of float32 (its largest number is {largest:g})"


def _check_case_collisions(name: str, classes: Sequence[str]) -> None:
    """Refuse classes that are one class on some file systems and two on others."""
    spelling_of: dict[str, str] = {}
    for class_name in classes:
        key = class_name.replace("_", " ").casefold()
        if key in spelling_of:
            spellings = f"{spelling_of[key]!r} and {class_name!r}"
            raise DataError(f"{name}: the classes {spellings} differ only in case or blanks; give them one spelling")
        spelling_of[key] = class_name


def string_column(values: Any, rows: int) -> Strings:
    """Return a column of strings; a missing one takes no memory."""
    if values is None:
        return np.broadcast_to(np.array(""), rows)
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        return np.array([to_nfc(str(value)) for value in values], np.str_)
    unique, inverse = np.unique(array, return_inverse=True)
    return np.array([str(value) for value in unique.tolist()])[inverse]


def anonymise_groups(groups: Sequence[str]) -> Strings:
    """Replace group names by numbers: the identity of a patient gets into no record, fingerprint or message."""
    number = {name: str(index) for index, name in enumerate(dict.fromkeys(filter(None, groups)))}
    return string_column([number.get(name, "") for name in groups], len(groups))


def readable_name(name: str) -> str:
    """Return a class name as in a sentence: `Alarm_Clock` becomes "alarm clock"."""
    return " ".join(name.replace("_", " ").split()).lower()


def relabel(labels: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the labels as other class numbers, given those of all classes; samples without a label stay so."""
    out: NDArray[np.int64] = np.where(labels < 0, UNLABELLED, numbers[labels.clip(min=0)])
    return out


def match_classes(names: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Return the class number of each name, -1 for none; case matters only between two classes that differ in it."""
    exact = {to_nfc(name).replace("_", " "): index for index, name in enumerate(classes)}
    loose = {name.casefold(): index for name, index in exact.items()}
    normalised = [to_nfc(name).replace("_", " ") for name in names]
    return [exact.get(name, loose.get(name.casefold(), -1)) for name in normalised]
