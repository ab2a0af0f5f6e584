"""Split samples into train, validation and test; draw few-shot subsets; find images that two splits share.

Pure functions of arrays. The caller passes samples in an order fixed by content and a generator seeded by purpose,
so that a split does not depend on the file system.
"""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from math import floor

import numpy as np
from numpy.typing import NDArray

from fedvlm.errors import DataError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Strings = NDArray[np.str_]
SPLITS = ("train", "validation", "test")
SPLIT_ALIASES = {  # the names that files and folders may use
    "": "",
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}


def read_splits(
    context: str, values: Iterable[str], row_name: Callable[[int], str] = lambda row: f"row {row}"
) -> Strings:
    """Return the split of each sample under its one name; refuse names that are no split."""
    names = [str(value).strip().lower() for value in values]
    for row, name in enumerate(names):
        if name not in SPLIT_ALIASES:
            raise DataError(f"{context}: {row_name(row)} has the split {name!r}; a split is train, val or test")
    return np.array([SPLIT_ALIASES[name] for name in names], dtype=np.str_)


def split_samples(
    marks: Sequence[str],
    ratios: tuple[float, float, float],
    rng: np.random.Generator,
    pool: str,
    groups: Strings | None = None,
) -> Ints:
    """Return the split (0 train, 1 validation, 2 test) of each sample of one pool; a group is never divided.

    Samples that the data marks keep their split. A split that no sample is marked for is taken out of train:
    floor(ratio · samples) if nothing is marked, the same proportion of train and that split otherwise.
    """
    marked = {mark for mark in marks if mark}
    if unknown := sorted(marked - set(SPLITS)):
        raise DataError(f"{pool}: {unknown[0]!r} is not a split; use one of {', '.join(SPLITS)}")
    if marked and "" in marks:
        missing = sum(not mark for mark in marks)
        raise DataError(f"{pool}: {missing} of {len(marks)} rows have no split; give all rows a split or none")
    parts = np.array([SPLITS.index(mark) if mark else 0 for mark in marks], dtype=np.int64)
    if groups is not None and marked:
        _check_marks(marks, groups, pool)
    open_rows = np.flatnonzero(parts == 0)
    units = [[row] for row in open_rows.tolist()] if groups is None else group_samples(open_rows, groups)
    units = [units[i] for i in rng.permutation(len(units))]
    exact = [Fraction(str(ratio)) for ratio in ratios]  # floor(0.29 · 100) is 29, not 28
    absent = [part for part in (2, 1) if SPLITS[part] not in marked]
    total = exact[0] + sum(exact[part] for part in absent)
    start = 0
    for part in absent:
        size = floor(len(open_rows) * exact[part] / total) if total else 0
        chosen = take_units(units[start:], size)
        parts[[row for unit in chosen for row in unit]] = part
        start += len(chosen)
    return parts


def group_samples(rows: Ints, groups: Strings) -> list[list[int]]:
    """Collect the rows of each group, in the order of their first; a row without a group stands alone."""
    units: dict[str, list[int]] = {}
    for row in rows.tolist():
        name = str(groups[row])
        units.setdefault(f"group {name}" if name else f"row {row}", []).append(row)
    return list(units.values())


def take_units(units: list[list[int]], size: int) -> list[list[int]]:
    """Take the first units that have at most `size` rows together, and at least one unit unless `size` is 0."""
    ends = np.cumsum([len(unit) for unit in units])
    count = int(np.searchsorted(ends, size, side="right"))
    return units[: max(count, 1) if size else 0]


def draw_samples(rows: Ints, size: int, groups: Strings | None, rng: np.random.Generator) -> Ints:
    """Draw about `size` rows at random; groups are drawn as a whole."""
    if groups is None:
        return rng.permutation(rows)[:size]
    units = group_samples(rows, groups)
    chosen = take_units([units[i] for i in rng.permutation(len(units))], size)
    return np.array([row for unit in chosen for row in unit], dtype=np.int64)


def _check_marks(marks: Sequence[str], groups: Strings, pool: str) -> None:
    mark_of_group: dict[str, str] = {}
    for name, mark in zip(groups.tolist(), marks, strict=True):
        if name and mark_of_group.setdefault(name, mark) != mark:
            raise DataError(f"{pool}: the group {name!r} is in {mark_of_group[name]} and in {mark}; give it one split")


def draw_shots(labels: Ints, shots: int, rng: np.random.Generator) -> Ints:
    """Return positions of at most `shots` samples of each class, drawn at random, in the given order."""
    mixed = rng.permutation(len(labels))
    chosen = [mixed[labels[mixed] == label][:shots] for label in np.unique(labels)]
    return np.sort(np.concatenate(chosen)) if chosen else mixed


def find_duplicates(content: Ints, parts: Ints) -> NDArray[np.bool_]:
    """Mark samples whose image is also in an earlier split.

    `content` are ranks: small numbers that are equal for equal images.
    """
    first = np.full(int(content.max(initial=-1)) + 1, len(SPLITS), dtype=np.int8)
    np.minimum.at(first, content, parts.astype(np.int8))
    is_later: NDArray[np.bool_] = parts > first[content]
    return is_later
