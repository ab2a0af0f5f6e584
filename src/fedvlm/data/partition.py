"""Who has how many rows of which class."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import sha256
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedvlm.data import splits
from fedvlm.data.clients import Clients
from fedvlm.data.clients import assign_clients as owners_of
from fedvlm.data.splits import SPLITS, Ints
from fedvlm.data.table import Dataset, Strings, rank_digests, sort_order, unique_with_inverse
from fedvlm.errors import DataError, unknown_name
from fedvlm.seeds import numbers

SPLIT_FIELDS = ("train", "validation", "test", "calibration")


@dataclass(frozen=True)
class ClientSplit:
    """One client of the federation, as row numbers of the table."""

    id: str
    domain: str  # empty if its rows come from several domains, or from none that is named
    train: Ints
    validation: Ints
    test: Ints
    calibration: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # nothing else's


class ClientSplits(Mapping[str, ClientSplit]):
    """Members by id, in the order in which they came."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._domains: list[str] = []
        self._rows = array("q")  # of one member after the other, part by part
        self._ends = array("q", [0])  # of every part of every member

    def add(self, member: ClientSplit) -> None:
        self._number[member.id] = len(self._number)
        self._domains.append(member.domain)
        for part in SPLIT_FIELDS:
            self._rows.frombytes(np.asarray(getattr(member, part), np.int64).tobytes())
            self._ends.append(len(self._rows))

    def __getitem__(self, id: str) -> ClientSplit:
        number = self._number[id]
        first = number * len(SPLIT_FIELDS)
        ends = self._ends[first : first + len(SPLIT_FIELDS) + 1].tolist()
        start = ends[0]
        rows = np.array(self._rows[start : ends[-1]], np.int64)  # a copy, the caller's own
        parts = [rows[a - start : b - start] for a, b in pairwise(ends)]
        return ClientSplit(id, self._domains[number], *parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._number)

    def __len__(self) -> int:
        return len(self._number)

    def __contains__(self, id: object) -> bool:
        return id in self._number


SPLIT_PREFIX = "split:"  # before the part of a target that is what the data marks so


class SampleTable(Protocol):
    """What `divide` looks at; Embedded has it, and `Listing` for a data set not yet encoded."""

    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def labels(self) -> NDArray[np.int64]: ...
    @property
    def domains(self) -> Strings: ...
    @property
    def clients(self) -> Strings: ...
    @property
    def splits(self) -> Strings: ...
    @property
    def content(self) -> Sequence[str]: ...
    @property
    def groups(self) -> Strings | None: ...


@dataclass(frozen=True)
class SampleList:
    """The columns of a data set and the digests of its images, without the images."""

    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    domains: Strings
    clients: Strings
    splits: Strings
    content: Sequence[str]
    groups: Strings | None = None


@dataclass(frozen=True)
class Partition:
    clients: Mapping[str, ClientSplit]  # by id, in order
    dropped: int  # rows dropped because an earlier part has the same image
    public: Ints  # rows set aside, nobody's

    @property
    def domains(self) -> dict[str, str]:
        """By client; empty where a client's rows come from several domains, or from none."""
        return {id: client.domain for id, client in self.clients.items()}


def image_digest(image: bytes) -> str:
    """Equal digests are the same image: SHA-256 of the encoded bytes."""
    return sha256(image).hexdigest()


def list_samples(dataset: Dataset, progress: Callable[[int, int], None] | None = None) -> SampleList:
    """A data set as `divide` wants it, before any encoder has seen it."""
    total = len(dataset.source)
    content = []
    for row in range(total):
        content.append(image_digest(dataset.source.read(row)))
        if progress:
            progress(row + 1, total)
    return SampleList(
        dataset.classes,
        dataset.labels,
        dataset.domains,
        dataset.clients,
        dataset.splits,
        content,
        dataset.groups,
    )


def make_partition(table: SampleTable, clients: Clients, seed: int, targets: Sequence[str] = ()) -> Partition:
    """Deals the rows of a table to clients and parts; no image is in two parts of any clients.

    The same rows in another order are dealt the same way: all drawing is over rows sorted by
    content. A pool (a domain, one of the data's own clients, or everything) is parted on its own,
    so that adding a domain changes no other. Domains named in `whole` become one client each,
    however the others are dealt, and so do the rows that are marked test for "split:test"; other
    names in it are those of clients.
    """
    table = _apply_split_targets(table, targets)
    labels = _check_columns(table, clients)
    content = rank_digests(table.content)
    order = sort_order(content, table.domains, labels, table.clients, table.splits)
    selected = _select_samples(table, clients, targets)
    order = order[selected[order]]
    pools, pool_of = unique_with_inverse(_pools(table, clients, targets))
    groups = table.groups
    if groups is not None:
        _check_groups(groups, pools[pool_of], selected)
    parts = np.zeros(len(labels), dtype=np.int64)
    owners = np.full(len(labels), -1, dtype=np.int64)
    names: list[str] = []
    for pool, rows in zip(pools.tolist(), _split_by_group(order, pool_of, len(pools)), strict=True):
        if not len(rows):
            continue
        title = f"{'client' if clients.partition == 'own' else 'domain'} {pool!r}" if pool else "the data"
        is_single_client = clients.partition in ("domain", "own") or pool in targets
        if clients.public_ratio and pool not in targets:
            open_rows = rows[np.isin(table.splits[rows], ("", "train"))]
            size = int(Fraction(str(clients.public_ratio)) * len(rows))
            parts[splits.draw_samples(open_rows, size, groups, numbers("public", seed, pool))] = len(SPLITS)
            rows = rows[parts[rows] < len(SPLITS)]
        drawn = numbers("split", seed, pool)
        marks = table.splits[rows].tolist()
        named = None if groups is None else groups[rows]
        parts[rows] = splits.split_samples(marks, clients.ratios, drawn, title, named)
        client_numbers = np.zeros(len(rows), dtype=np.int64)
        if not is_single_client:
            client_numbers = owners_of(labels[rows], parts[rows], clients, table.classes, seed, pool, title)
        owners[rows] = len(names) + client_numbers
        names += [pool] if is_single_client else _client_names(clients, pool)
    is_duplicate = np.zeros(len(labels), dtype=np.bool_)
    selection = slice(None) if selected.all() else selected  # without copies of what may be large
    is_duplicate[selection] = splits.find_duplicates(content[selection], parts[selection])
    parts[is_duplicate] = -1
    if clients.shots:
        _check_training_classes(table.classes, labels[selected & (parts == 0)])
    units = _sample_units(content, groups) if clients.calibration_ratio else table.domains
    client_splits = ClientSplits()
    assigned = order[owners[order] >= 0]
    for name, client_rows in zip(names, _split_by_group(assigned, owners, len(names)), strict=True):
        train, validation, test = (client_rows[parts[client_rows] == part] for part in range(len(SPLITS)))
        train = _limit_shots(labels, train, clients.shots, "shots", seed, name)
        validation = _limit_shots(labels, validation, clients.n_val_shots, "validation shots", seed, name)
        domains = sorted(set(table.domains[client_rows].tolist()))
        domain = domains[0] if len(domains) == 1 else ""
        calibration = _calibration_samples(validation, clients.calibration_ratio or 0.0, units, seed, name)
        validation = validation[~np.isin(validation, calibration)] if len(calibration) else validation
        member = ClientSplit(name, domain, train, validation, test, calibration)
        only = name.startswith(SPLIT_PREFIX)  # rows of one part, and no other
        _check_client(member, (0, 0, 1) if only else clients.ratios, len(client_rows))
        client_splits.add(member)
    for name in targets:
        if name not in client_splits and name not in table.domains:
            raise unknown_name("domain or client", name, {*client_splits, *table.domains.tolist()} - {""})
    return Partition(client_splits, int(is_duplicate.sum()), order[parts[order] == len(SPLITS)])


def _apply_split_targets(table: SampleTable, targets: Sequence[str]) -> SampleTable:
    """With the rows of a mark as a domain, where `whole` names it, as "split:test"."""
    for name in targets:
        if not name.startswith(SPLIT_PREFIX):
            continue
        is_marked = np.asarray(table.splits) == name.removeprefix(SPLIT_PREFIX)
        if name != f"{SPLIT_PREFIX}{SPLITS[-1]}" or not is_marked.any():
            raise DataError(
                f'{name!r} names no rows that the data marks itself; "{SPLIT_PREFIX}test" is for data '
                "with a test part, and other targets are domains or clients"
            )
        columns = (table.clients, table.splits, table.content, table.groups)
        domains = np.where(is_marked, name, table.domains)
        table = SampleList(table.classes, table.labels, domains, *columns)
    return table


def _sample_units(content: Ints, groups: Strings | None) -> Strings:
    """(rows,) what stays together when some are set aside: a group, or equal images."""
    alike = np.char.mod("\x1f%d", content)  # no name of a group begins so
    return alike if groups is None else np.where(groups == "", alike, groups)


def _calibration_samples(rows: Ints, ratio: float, units: Strings, seed: int, name: str) -> Ints:
    """A share of the validation rows, whole groups and equal images together."""
    if not ratio or len(set(units[rows].tolist())) < 2:
        return rows[:0]
    size = int(Fraction(str(ratio)).limit_denominator(1000) * len(rows))
    chosen = splits.draw_samples(rows, size, units, numbers("calibration", seed, name))
    return rows[np.isin(rows, chosen)]


def _check_groups(groups: Strings, pools: Strings, selected: NDArray[np.bool_]) -> None:
    """A group at two sites would be in two parts: they are parted on their own."""
    pool_of_group: dict[str, str] = {}
    for name, pool in zip(groups[selected].tolist(), pools[selected].tolist(), strict=True):
        if name and pool_of_group.setdefault(name, pool) != pool:
            raise DataError(
                f"the group {name!r} has rows at {pool_of_group[name]!r} and at {pool!r}, which are parted "
                "on their own; leave it to one of them, or give it two names if it is two"
            )


def _select_samples(table: SampleTable, clients: Clients, targets: Sequence[str]) -> NDArray[np.bool_]:
    """The rows that take part: of the chosen domains, and of those that stay whole."""
    for name in clients.domains:
        if name not in table.domains:
            raise unknown_name("domain", name, set(table.domains.tolist()))
    if not clients.domains:
        return np.ones(len(table.labels), dtype=np.bool_)
    return np.isin(table.domains, (*clients.domains, *targets))


def _split_by_group(order: Ints, group: Ints, count: int) -> Iterator[Ints]:
    """The rows of each group, in the given order."""
    grouped = order[np.argsort(group[order], kind="stable")]
    ends = np.cumsum(np.bincount(group[order], minlength=count)).tolist()
    return (grouped[first:end] for first, end in pairwise([0, *ends]))


def _check_columns(table: SampleTable, clients: Clients) -> Ints:
    """The labels, once all columns are known to fit each other and the classes."""
    labels = np.asarray(table.labels, dtype=np.int64)
    columns = (table.domains, table.clients, table.splits, table.content)
    if any(len(column) != len(labels) for column in columns):
        raise DataError(
            f"the columns have {[len(labels), *map(len, columns)]} rows (labels, domains, clients, "
            "splits, content); they must be of one length"
        )
    if not len(labels):
        raise DataError("the data have no rows; name a data set with images")
    counts = np.bincount(labels[labels >= 0], minlength=len(table.classes))
    if labels.min() < 0 or len(counts) > len(table.classes):
        wrong = labels[(labels < 0) | (labels >= len(table.classes))][0]
        raise DataError(f"label {wrong} has no class: there are {len(table.classes)} classes, counted from 0")
    if not counts.all():
        empty = table.classes[int(np.argmin(counts))]
        raise DataError(f"class {empty!r} has no rows; add images or leave it out of the classes")
    if clients.partition in ("domain", "domain-dirichlet"):
        alternative = "own" if (np.asarray(table.clients) != "").all() else "dirichlet"
        remedy = f"{alternative}: --set clients.partition={alternative} --set protocol=own-test"
        _check_column("domain", table.domains, clients.partition, remedy)
    if clients.partition == "own":
        _check_column("client", table.clients, clients.partition, '"domain", "dirichlet", "pathological"')
    return labels


def _check_column(kind: str, column: Strings, by: str, remedy: str) -> None:
    if bare := int((np.asarray(column) == "").sum()):
        raise DataError(
            f'{bare} of {len(column)} rows have no {kind}, so clients cannot be made by "{by}"; '
            f"give every row a {kind} or make clients by {remedy}"
        )


def _pools(table: SampleTable, clients: Clients, targets: Sequence[str]) -> Strings:
    """What is parted as a whole: a domain, one of the data's own clients, or everything."""
    if clients.partition in ("domain", "domain-dirichlet"):
        return table.domains
    nobody = np.broadcast_to(np.array(""), len(table.labels))
    pools = table.clients if clients.partition == "own" else nobody
    if not targets:
        return pools
    is_target = np.isin(table.domains, list(targets))
    if ambiguous := set(targets) & set(pools[~is_target].tolist()):
        raise DataError(f"{min(ambiguous)!r} is both a domain and a client; rename one of them")
    return np.where(is_target, table.domains, pools)


def _client_names(clients: Clients, pool: str) -> list[str]:
    stem = pool if clients.partition == "domain-dirichlet" else "client"
    return [f"{stem}-{index}" for index in range(clients.count)]


def _limit_shots(labels: Ints, rows: Ints, shots: int, purpose: str, seed: int, name: str) -> Ints:
    """At most so many rows of each class, or all."""
    if not shots:
        return rows
    return rows[splits.draw_shots(labels[rows], shots, numbers(purpose, seed, name))]


def _check_training_classes(classes: tuple[str, ...], trained: Ints) -> None:
    counts = np.bincount(trained, minlength=len(classes))
    if not counts.all():
        raise DataError(
            f"class {classes[int(np.argmin(counts))]!r} has no training rows to take shots from; "
            "add images of it, mark some as train, or set a larger share of train"
        )


def _check_client(member: ClientSplit, ratios: tuple[float, float, float], rows: int) -> None:
    for part, ratio in zip(SPLITS, ratios, strict=True):
        if ratio and not len(getattr(member, part)):
            raise DataError(
                f"client {member.id!r} has no {part} rows ({rows} rows in all, shares "
                f"{list(ratios)}); give it more images, set other shares, make fewer clients, or "
                "leave it out by naming the others: --set 'clients.domains=[…]'"
            )


def count_table(partition: Partition, table: SampleTable, parts: Sequence[str] = SPLITS) -> Ints:
    """Rows of each class at each client (clients, classes), over the parts asked for."""
    counts = np.zeros((len(partition.clients), len(table.classes)), dtype=np.int64)
    for index, member in enumerate(partition.clients.values()):
        for part in parts:
            rows = getattr(member, part)
            counts[index] += np.bincount(table.labels[rows], minlength=len(table.classes))
    return counts
