"""How rows are dealt: to train, validation and test, and to clients. Pure functions of arrays.

Every function takes its rows in an order the caller has fixed by content, and its random numbers
from a generator the caller has seeded by purpose, so that no file system has a say in a split.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import floor

import numpy as np
from numpy.typing import NDArray

from fedvlm.errors import DataError, SettingsError

SPLITS = ("train", "validation", "test")
MAX_DIRICHLET_DRAWS = 1000  # tries at a Dirichlet draw that leaves no client short

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Assigner = Callable[[Ints], Ints]  # rows to their clients


def split_samples(
    marks: Sequence[str],
    ratios: tuple[float, float, float],
    rng: np.random.Generator,
    pool: str,
    groups: NDArray[np.str_] | None = None,
) -> Ints:
    """The part (0 train, 1 validation, 2 test) of each row of one pool; a group is in one.

    Rows the data marks itself keep their part. A part nobody is marked for is taken out of train:
    floor(share · rows) if nothing is marked, the same proportion of train and that part otherwise.
    """
    marked = {mark for mark in marks if mark}
    if strange := sorted(marked - set(SPLITS)):
        raise DataError(f"{pool}: {strange[0]!r} is not a split; the split column takes {', '.join(SPLITS)}")
    if marked and "" in marks:
        bare = sum(not mark for mark in marks)
        raise DataError(f"{pool}: {bare} of {len(marks)} rows have no split; give all rows a split or none")
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


def group_samples(rows: Ints, groups: NDArray[np.str_]) -> list[list[int]]:
    """Rows that must not be parted, in the order of their first; no name is a group of its own."""
    units: dict[str, list[int]] = {}
    for row in rows.tolist():
        name = str(groups[row])
        units.setdefault(f"group {name}" if name else f"row {row}", []).append(row)
    return list(units.values())


def take_units(units: list[list[int]], size: int) -> list[list[int]]:
    """As many of the first units as have at most so many rows, and one if that is none."""
    ends = np.cumsum([len(unit) for unit in units])
    count = int(np.searchsorted(ends, size, side="right"))
    return units[: max(count, 1) if size else 0]


def draw_samples(rows: Ints, size: int, groups: NDArray[np.str_] | None, rng: np.random.Generator) -> Ints:
    """So many of the rows, drawn at random; where there are groups, only whole ones."""
    if groups is None:
        return rng.permutation(rows)[:size]
    units = group_samples(rows, groups)
    chosen = take_units([units[i] for i in rng.permutation(len(units))], size)
    return np.array([row for unit in chosen for row in unit], dtype=np.int64)


def _check_marks(marks: Sequence[str], groups: NDArray[np.str_], pool: str) -> None:
    mark_of_group: dict[str, str] = {}
    for name, mark in zip(groups.tolist(), marks, strict=True):
        if name and mark_of_group.setdefault(name, mark) != mark:
            raise DataError(
                f"{pool}: the group {name!r} is in {mark_of_group[name]} and in {mark}; mark all its rows alike"
            )


def pathological(classes: int, clients: int, rng: np.random.Generator) -> Ints:
    """The client of each class: classes shuffled, round(classes / clients) each, rest to the last.

    As the code of FedOTP deals them: 37 classes to 10 clients are nine of four and one of one.
    """
    classes_per_client = round(classes / clients)
    if classes_per_client < 1 or classes_per_client * (clients - 1) >= classes:
        raise SettingsError(
            f"{classes} classes cannot be dealt to {clients} clients without overlap: "
            f"round({classes}/{clients}) = {classes_per_client} classes each leave none for the last; "
            "set another count of clients"
        )
    owner = np.empty(classes, dtype=np.int64)
    owner[rng.permutation(classes)] = np.minimum(np.arange(classes) // classes_per_client, clients - 1)
    return owner


def dirichlet(
    labels: Ints,
    parts: Ints,
    clients: int,
    alpha: float,
    minimum: int,
    rng: np.random.Generator,
    pool: str,
    draw: Callable[[np.random.Generator], Floats] | None = None,
) -> Ints:
    """The client of each row: one Dirichlet(alpha) draw per class, the same for every part.

    `draw` gives other shares, (classes there are, clients).

    Drawn again until every client has `minimum` training rows and a row of each part there is.
    """
    cells = [
        np.flatnonzero((labels == label) & (parts == part))
        for label in np.unique(labels)
        for part in range(len(SPLITS))
    ]
    present = np.bincount(parts, minlength=len(SPLITS)) > 0
    min_counts = np.array([minimum, 1, 1]) * present
    if (short := np.bincount(parts, minlength=len(SPLITS)) < min_counts * clients).any():
        part = SPLITS[int(np.argmax(short))]
        raise SettingsError(
            f"{pool}: {int((parts == np.argmax(short)).sum())} {part} rows are too few for "
            f"{clients} clients with at least {int(min_counts[np.argmax(short)])} each; "
            "set a smaller count or minimum"
        )
    for _ in range(MAX_DIRICHLET_DRAWS):
        owner = np.empty(len(labels), dtype=np.int64)
        concentration = np.full(clients, alpha)
        proportions = draw(rng) if draw else rng.dirichlet(concentration, size=len(cells) // len(SPLITS))
        for index, cell in enumerate(cells):
            ends = np.floor(np.cumsum(proportions[index // len(SPLITS)])[:-1] * len(cell) + 0.5)
            mixed = rng.permutation(cell)
            owner[mixed] = np.searchsorted(ends, np.arange(len(cell)), side="right")
        counts = np.zeros((clients, len(SPLITS)), dtype=np.int64)
        np.add.at(counts, (owner, parts), 1)
        if (counts >= min_counts).all():
            return owner
    raise SettingsError(
        f"{pool}: in {MAX_DIRICHLET_DRAWS} draws with alpha = {alpha} some of {clients} clients always had fewer "
        f"than {minimum} training rows or none of a part; set a larger alpha, a smaller minimum or "
        "a smaller count"
    )


def draw_shots(labels: Ints, shots: int, rng: np.random.Generator) -> Ints:
    """Positions of at most `shots` rows of each class, drawn at random, in the given order."""
    mixed = rng.permutation(len(labels))
    chosen = [mixed[labels[mixed] == label][:shots] for label in np.unique(labels)]
    return np.sort(np.concatenate(chosen)) if chosen else mixed


def find_duplicates(content: Ints, parts: Ints) -> NDArray[np.bool_]:
    """True for rows whose image is also in an earlier part (train, validation, test).

    `content` are ranks: small numbers, the same for rows of the same image.
    """
    first = np.full(int(content.max(initial=-1)) + 1, len(SPLITS), dtype=np.int8)
    np.minimum.at(first, content, parts.astype(np.int8))
    later: NDArray[np.bool_] = parts > first[content]
    return later
