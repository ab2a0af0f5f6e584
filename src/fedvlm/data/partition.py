"""Partition a data set: assign samples to clients, each with its own train, validation and test samples."""

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
from fedvlm.data.clients import Clients, Pool, assign_clients
from fedvlm.data.splits import SPLITS, Ints, Strings
from fedvlm.data.table import (
    UNLABELLED,
    Dataset,
    Findings,
    count_classes,
    pattern_names,
    rank_digests,
    sort_order,
    unique_with_inverse,
)
from fedvlm.errors import DataError, unknown_name
from fedvlm.seeds import numbers

SPLIT_FIELDS = (*SPLITS, "calibration", "unlabelled")
SPLIT_PREFIX = "split:"  # a target of this prefix names samples by the split that the data marks


@dataclass(frozen=True)
class ClientSplit:
    """The samples of one client, as row numbers of the table."""

    id: str
    domain: str  # empty if the samples come from several domains or from none
    train: Ints
    validation: Ints
    test: Ints
    calibration: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # used for nothing else
    unlabelled: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


class ClientSplits(Mapping[str, ClientSplit]):
    """Client splits by id, in order; stored in two flat arrays, because there may be a million clients."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._domains: list[str] = []
        self._rows = array("q")  # client by client, split by split
        self._ends = array("q", [0])  # of every split of every client

    def add(self, client: ClientSplit) -> None:
        self._number[client.id] = len(self._number)
        self._domains.append(client.domain)
        for split in SPLIT_FIELDS:
            self._rows.frombytes(np.asarray(getattr(client, split), np.int64).tobytes())
            self._ends.append(len(self._rows))

    def __getitem__(self, id: str) -> ClientSplit:
        number = self._number[id]
        first = number * len(SPLIT_FIELDS)
        ends = self._ends[first : first + len(SPLIT_FIELDS) + 1].tolist()
        start = ends[0]
        rows = np.array(self._rows[start : ends[-1]], np.int64)  # a copy that the caller may change
        return ClientSplit(id, self._domains[number], *(rows[a - start : b - start] for a, b in pairwise(ends)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._number)

    def __len__(self) -> int:
        return len(self._number)

    def __contains__(self, id: object) -> bool:
        return id in self._number


class SampleTable(Protocol):
    """The columns that a partition depends on; EmbeddedTable has them, and SampleList before encoding."""

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
    @property
    def findings(self) -> Findings | None: ...


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
    findings: Findings | None = None


@dataclass(frozen=True)
class Partition:
    """The clients of a federation with their samples."""

    clients: Mapping[str, ClientSplit]  # by id, in order
    dropped: int  # samples dropped because an earlier split has the same image
    public: Ints  # samples of no client

    @property
    def domains(self) -> dict[str, str]:
        """The domain of each client; empty where its samples come from several domains or from none."""
        return {id: client.domain for id, client in self.clients.items()}


def select_samples(table: SampleTable, rows: Ints, classes: slice = slice(None)) -> SampleList:
    """Return some samples, whose labels are those of some classes."""
    columns = {name: getattr(table, name)[rows] for name in ("domains", "clients", "splits")}
    columns |= {"groups": None if table.groups is None else table.groups[rows]}
    content, labels = [table.content[row] for row in rows.tolist()], np.asarray(table.labels, np.int64)[rows]
    return SampleList(table.classes[classes], labels - (classes.start or 0), content=content, **columns)


def image_digest(image: bytes) -> str:
    """Return the SHA-256 of the encoded bytes: equal digests are the same image."""
    return sha256(image).hexdigest()


def list_samples(dataset: Dataset, progress: Callable[[int, int], None] | None = None) -> SampleList:
    """Read every image once and return what `make_partition` needs, before any encoder is used."""
    total = len(dataset.source)
    content = []
    for row in range(total):
        content.append(image_digest(dataset.source.read(row)))
        if progress:
            progress(row + 1, total)
    columns = (dataset.classes, dataset.labels, dataset.domains, dataset.clients, dataset.splits)
    return SampleList(*columns, content, dataset.groups, dataset.findings)


def make_partition(table: SampleTable, clients: Clients, seed: int, targets: Sequence[str] = ()) -> Partition:
    """Assign the samples of a table to clients and splits; no image is in two splits of any clients.

    The order of the samples does not matter: everything is drawn over samples sorted by content. A pool (a domain,
    one of the data's own clients, or everything) is split on its own, so adding a domain changes no other. Each domain
    named in `targets` becomes one client, however the others are assigned, and so do the samples marked test for
    "split:test"; other targets are names of clients.
    """
    table = _apply_split_targets(_by_pattern(table), targets)
    if (np.asarray(table.labels) == UNLABELLED).any():
        return _partition_with_unlabelled(table, clients, seed, targets)
    return _partition_labelled(table, clients, seed, targets)


def _partition_labelled(table: SampleTable, clients: Clients, seed: int, targets: Sequence[str]) -> Partition:
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
        if clients.public_ratio and pool not in targets:
            open_rows = rows[np.isin(table.splits[rows], ("", "train"))]
            size = int(Fraction(str(clients.public_ratio)) * len(rows))
            parts[splits.draw_samples(open_rows, size, groups, numbers("public", seed, pool))] = len(SPLITS)
            rows = rows[parts[rows] < len(SPLITS)]
        marks = table.splits[rows].tolist()
        pool_groups = None if groups is None else groups[rows]
        parts[rows] = splits.split_samples(marks, clients.ratios, numbers("split", seed, pool), title, pool_groups)
        if clients.partition in ("domain", "own") or pool in targets:
            owners[rows] = len(names)
            names.append(pool)
        else:
            samples = Pool(pool, title, labels[rows], parts[rows])
            owners[rows] = len(names) + assign_clients(samples, clients, table.classes, seed)
            stem = pool if clients.partition == "domain-dirichlet" else "client"
            names += [f"{stem}-{index}" for index in range(clients.count)]
    is_duplicate = np.zeros(len(labels), dtype=np.bool_)
    selection = slice(None) if selected.all() else selected  # no copy of arrays that may be large
    is_duplicate[selection] = splits.find_duplicates(content[selection], parts[selection])
    parts[is_duplicate] = -1
    if clients.shots:
        _check_training_classes(table.classes, labels[selected & (parts == 0)])
    units = _sample_units(content, groups) if clients.calibration_ratio else table.domains
    client_splits = ClientSplits()
    assigned = order[owners[order] >= 0]
    for name, client_rows in zip(names, _split_by_group(assigned, owners, len(names)), strict=True):
        train, validation, test = (client_rows[parts[client_rows] == part] for part in range(len(SPLITS)))
        if clients.shots:
            train = train[splits.draw_shots(labels[train], clients.shots, numbers("shots", seed, name))]
        if clients.n_val_shots:
            rng = numbers("validation shots", seed, name)
            validation = validation[splits.draw_shots(labels[validation], clients.n_val_shots, rng)]
        domains = sorted(set(table.domains[client_rows].tolist()))
        domain = domains[0] if len(domains) == 1 else ""
        calibration = _calibration_samples(validation, clients.calibration_ratio or 0.0, units, seed, name)
        validation = validation[~np.isin(validation, calibration)] if len(calibration) else validation
        client = ClientSplit(name, domain, train, validation, test, calibration)
        _check_client(client, (0, 0, 1) if name.startswith(SPLIT_PREFIX) else clients.ratios, len(client_rows))
        client_splits.add(client)
    for name in targets:
        if name not in client_splits and name not in table.domains:
            raise unknown_name("domain or client", name, {*client_splits, *table.domains.tolist()} - {""})
    return Partition(client_splits, int(is_duplicate.sum()), order[parts[order] == len(SPLITS)])


def _partition_with_unlabelled(table: SampleTable, clients: Clients, seed: int, targets: Sequence[str]) -> Partition:
    """Partition the labelled samples, then give each client its samples without a label.

    They belong to the client or domain that the data names, and otherwise are divided evenly over the clients of their
    pool. An image or a group that any client validates, calibrates or tests on is dropped.
    """
    labels = np.asarray(table.labels, dtype=np.int64)
    labelled, unlabelled = np.flatnonzero(labels != UNLABELLED), np.flatnonzero(labels == UNLABELLED)
    if not len(labelled):
        raise DataError("no sample has a label; give some of them one")
    partition = _partition_labelled(select_samples(table, labelled), clients, seed, targets)
    members_of = partition.clients.items()
    rows_of = {id: {split: labelled[getattr(client, split)] for split in SPLIT_FIELDS} for id, client in members_of}
    held_out = [rows[split] for rows in rows_of.values() for split in ("validation", "test", "calibration")]
    excluded = np.concatenate([labelled[partition.public], *held_out])
    content = rank_digests(table.content)
    is_used = np.isin(table.splits[unlabelled], ("", SPLITS[0])) & _select_samples(table, clients, targets)[unlabelled]
    is_used &= ~np.isin(content[unlabelled], content[excluded])
    if table.groups is not None:
        is_used &= ~np.isin(table.groups[unlabelled], np.setdiff1d(table.groups[excluded], [""]))
    pools = _pools(table, clients, targets)
    members = ClientSplits()
    for id, client in partition.clients.items():
        pool = id if id in pools else client.domain if clients.partition == "domain-dirichlet" else ""
        rows = unlabelled[is_used & (pools[unlabelled] == pool)]
        if pool != id:
            siblings = [other for other in partition.clients if pool in ("", partition.clients[other].domain)]
            order = numbers("unlabelled", seed, pool).permutation(rows[np.argsort(content[rows])])
            rows = np.sort(order[siblings.index(id) :: len(siblings)])
        members.add(ClientSplit(id, client.domain, **(rows_of[id] | {"unlabelled": rows})))
    return Partition(members, partition.dropped + int((~is_used).sum()), labelled[partition.public])


def _by_pattern(table: SampleTable) -> SampleTable:
    """Return samples with several findings each as samples of one class, their pattern of findings."""
    if table.findings is None:
        return table
    columns = (table.domains, table.clients, table.splits, table.content, table.groups)
    present, labels = np.unique(table.labels, return_inverse=True)  # some patterns may have no sample left
    return SampleList(pattern_names(table.findings[present], table.classes), labels.reshape(-1), *columns)


def _apply_split_targets(table: SampleTable, targets: Sequence[str]) -> SampleTable:
    """Turn the samples marked test into a domain if "split:test" is a target."""
    for name in targets:
        if not name.startswith(SPLIT_PREFIX):
            continue
        is_marked = np.asarray(table.splits) == name.removeprefix(SPLIT_PREFIX)
        if name != f"{SPLIT_PREFIX}{SPLITS[-1]}" or not is_marked.any():
            needs = f'"{SPLIT_PREFIX}test" needs data with a test split, and other targets are domains or clients'
            raise DataError(f"the data mark no samples for the target {name!r}; {needs}")
        domains = np.where(is_marked, name, table.domains)
        columns = (table.clients, table.splits, table.content, table.groups)
        table = SampleList(table.classes, table.labels, domains, *columns)
    return table


def _sample_units(content: Ints, groups: Strings | None) -> Strings:
    """(samples,) what must not be divided: a group, or equal images."""
    alike = np.char.mod("\x1f%d", content)  # no group name begins with this character
    return alike if groups is None else np.where(groups == "", alike, groups)


def _calibration_samples(rows: Ints, ratio: float, units: Strings, seed: int, name: str) -> Ints:
    """Draw a fraction of the validation samples; groups and equal images stay together."""
    if not ratio or len(set(units[rows].tolist())) < 2:
        return rows[:0]
    size = int(Fraction(str(ratio)).limit_denominator(1000) * len(rows))
    chosen = splits.draw_samples(rows, size, units, numbers("calibration", seed, name))
    return rows[np.isin(rows, chosen)]


def _check_groups(groups: Strings, pools: Strings, selected: NDArray[np.bool_]) -> None:
    """Refuse a group in two pools: these are split independently, so it could be in train and in test."""
    pool_of_group: dict[str, str] = {}
    for name, pool in zip(groups[selected].tolist(), pools[selected].tolist(), strict=True):
        if name and pool_of_group.setdefault(name, pool) != pool:
            raise DataError(
                f"the group {name!r} has samples at {pool_of_group[name]!r} and at {pool!r}, which are split "
                "independently; leave it to one of them, or give it two names if it is two groups"
            )


def _select_samples(table: SampleTable, clients: Clients, targets: Sequence[str]) -> NDArray[np.bool_]:
    """(samples,) whether a sample belongs to the chosen domains or to a target."""
    for name in clients.domains:
        if name not in table.domains:
            raise unknown_name("domain", name, set(table.domains.tolist()))
    if not clients.domains:
        return np.ones(len(table.labels), dtype=np.bool_)
    return np.isin(table.domains, (*clients.domains, *targets))


def _split_by_group(order: Ints, group: Ints, count: int) -> Iterator[Ints]:
    """Yield the rows of each group, in the given order."""
    grouped = order[np.argsort(group[order], kind="stable")]
    ends = np.cumsum(np.bincount(group[order], minlength=count)).tolist()
    return (grouped[first:end] for first, end in pairwise([0, *ends]))


def _check_columns(table: SampleTable, clients: Clients) -> Ints:
    """Return the labels after checking that all columns fit each other and the classes."""
    labels = np.asarray(table.labels, dtype=np.int64)
    columns = (table.domains, table.clients, table.splits, table.content)
    if any(len(column) != len(labels) for column in columns):
        lengths = [len(labels), *map(len, columns)]
        problem = f"labels, domains, clients, splits and content have {lengths} rows"
        raise DataError(f"{problem}; they must have the same length")
    if not len(labels):
        raise DataError("the data have no samples; name a data set with images")
    counts = np.bincount(labels[labels >= 0], minlength=len(table.classes))
    if labels.min() < 0 or len(counts) > len(table.classes):
        wrong = labels[(labels < 0) | (labels >= len(table.classes))][0]
        raise DataError(f"label {wrong} has no class: there are {len(table.classes)} classes, counted from 0")
    if not counts.all():
        empty = table.classes[int(np.argmin(counts))]
        raise DataError(f"class {empty!r} has no samples; add images or leave it out of the classes")
    has_clients = bool((np.asarray(table.clients) != "").all())
    if clients.partition in ("domain", "domain-dirichlet"):
        alternative = "own" if has_clients else "dirichlet"
        remedy = f"--set clients.partition={alternative} --set protocol=own-test"
        _check_column("domain", table.domains, clients.partition, remedy)
    if clients.partition == "own":
        _check_column("client", table.clients, clients.partition, "--set clients.partition=dirichlet")
    return labels


def _check_column(kind: str, column: Strings, partition: str, remedy: str) -> None:
    if missing := int((np.asarray(column) == "").sum()):
        problem = f'{missing} of {len(column)} samples have no {kind}, which clients.partition = "{partition}" needs'
        raise DataError(f"{problem}; give every sample a {kind}, or use {remedy}")


def _pools(table: SampleTable, clients: Clients, targets: Sequence[str]) -> Strings:
    """(samples,) the pool of each sample: its domain, its own client, or "" for all."""
    if clients.partition in ("domain", "domain-dirichlet"):
        return table.domains
    pools = table.clients if clients.partition == "own" else np.broadcast_to(np.array(""), len(table.labels))
    if not targets:
        return pools
    is_target = np.isin(table.domains, list(targets))
    if ambiguous := set(targets) & set(pools[~is_target].tolist()):
        raise DataError(f"{min(ambiguous)!r} is both a domain and a client; rename one of them")
    return np.where(is_target, table.domains, pools)


def _check_training_classes(classes: tuple[str, ...], labels: Ints) -> None:
    counts = np.bincount(labels, minlength=len(classes))
    if not counts.all():
        raise DataError(
            f"class {classes[int(np.argmin(counts))]!r} has no training samples to draw shots from; "
            "add images of it, mark some as train, or set a larger ratio for train in clients.ratios"
        )


def _check_client(client: ClientSplit, ratios: tuple[float, float, float], n_samples: int) -> None:
    for split, ratio in zip(SPLITS, ratios, strict=True):
        if ratio and not len(getattr(client, split)):
            raise DataError(
                f"client {client.id!r} has no {split} samples ({n_samples} samples in all, clients.ratios = "
                f"{list(ratios)}); add images, set other ratios, use fewer clients, or leave it out by naming the "
                "others: --set 'clients.domains=[…]'"
            )


def count_table(partition: Partition, table: SampleTable, parts: Sequence[str] = SPLITS) -> Ints:
    """(clients, classes): count the samples of each class at each client over the given splits."""
    counts = np.zeros((len(partition.clients), len(table.classes)), dtype=np.int64)
    for index, client in enumerate(partition.clients.values()):
        rows = np.concatenate([getattr(client, split) for split in parts])
        counts[index] = count_classes(table, rows)
    return counts
