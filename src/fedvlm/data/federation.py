"""Rows become clients, each with its own train, validation and test rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedvlm.data import splits
from fedvlm.data.clients import Clients
from fedvlm.data.deals import owners as owners_of
from fedvlm.data.members import Member, Members
from fedvlm.data.splits import PARTS, Ints
from fedvlm.data.table import Dataset, Strings, numbered, ranks, sorted_by
from fedvlm.errors import DataError, unknown
from fedvlm.seeds import numbers

MARKED = "split:"  # before the part of a target that is what the data marks so


class Table(Protocol):
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
class Listing:
    """The columns of a data set and the digests of its images, without the images."""

    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    domains: Strings
    clients: Strings
    splits: Strings
    content: Sequence[str]
    groups: Strings | None = None


@dataclass(frozen=True)
class Division:
    members: Mapping[str, Member]  # by id, in order
    dropped: int  # rows dropped because an earlier part has the same image
    public: Ints  # rows set aside, nobody's

    @property
    def domains(self) -> dict[str, str]:
        """By client; empty where a client's rows come from several domains, or from none."""
        return {id: one.domain for id, one in self.members.items()}


def digest(image: bytes) -> str:
    """Equal digests are the same image: SHA-256 of the encoded bytes."""
    return sha256(image).hexdigest()


def rows_of(dataset: Dataset, progress: Callable[[int, int], None] | None = None) -> Listing:
    """A data set as `divide` wants it, before any encoder has seen it."""
    total = len(dataset.source)
    content = []
    for row in range(total):
        content.append(digest(dataset.source.read(row)))
        if progress:
            progress(row + 1, total)
    return Listing(
        dataset.classes,
        dataset.labels,
        dataset.domains,
        dataset.clients,
        dataset.splits,
        content,
        dataset.groups,
    )


def divide(table: Table, clients: Clients, seed: int, whole: Sequence[str] = ()) -> Division:
    """Deals the rows of a table to clients and parts; no image is in two parts of any clients.

    The same rows in another order are dealt the same way: all drawing is over rows sorted by
    content. A pool (a domain, one of the data's own clients, or everything) is parted on its own,
    so that adding a domain changes no other. Domains named in `whole` become one client each,
    however the others are dealt, and so do the rows that are marked test for "split:test"; other
    names in it are those of clients.
    """
    table = _marked(table, whole)
    labels = _checked(table, clients)
    content = ranks(table.content)
    order = sorted_by(content, table.domains, labels, table.clients, table.splits)
    kept = _kept(table, clients, whole)
    order = order[kept[order]]
    pools, pool_of = numbered(_pools(table, clients, whole))
    groups = table.groups
    if groups is not None:
        _check_groups(groups, pools[pool_of], kept)
    parts = np.zeros(len(labels), dtype=np.int64)
    owners = np.full(len(labels), -1, dtype=np.int64)
    names: list[str] = []
    for pool, rows in zip(pools.tolist(), _groups(order, pool_of, len(pools)), strict=True):
        if not len(rows):
            continue
        title = (
            f"{'client' if clients.partition == 'own' else 'domain'} {pool!r}"
            if pool
            else "the data"
        )
        alone = clients.partition in ("domain", "own") or pool in whole
        if clients.public_ratio and pool not in whole:
            open_rows = rows[np.isin(table.splits[rows], ("", "train"))]
            size = int(Fraction(str(clients.public_ratio)) * len(rows))
            parts[splits.some(open_rows, size, groups, numbers("public", seed, pool))] = len(PARTS)
            rows = rows[parts[rows] < len(PARTS)]
        drawn = numbers("split", seed, pool)
        marks = table.splits[rows].tolist()
        named = None if groups is None else groups[rows]
        parts[rows] = splits.parts_of(marks, clients.ratios, drawn, title, named)
        deal = np.zeros(len(rows), dtype=np.int64)
        if not alone:
            deal = owners_of(labels[rows], parts[rows], clients, table.classes, seed, pool, title)
        owners[rows] = len(names) + deal
        names += [pool] if alone else _members(clients, pool)
    later = np.zeros(len(labels), dtype=np.bool_)
    which = slice(None) if kept.all() else kept  # without copies of what may be large
    later[which] = splits.repeated(content[which], parts[which])
    parts[later] = -1
    if clients.shots:
        _check_trained(table.classes, labels[kept & (parts == 0)])
    units = _units(content, groups) if clients.calibration_ratio else table.domains
    made = Members()
    dealt = order[owners[order] >= 0]
    for name, mine in zip(names, _groups(dealt, owners, len(names)), strict=True):
        train, validation, test = (mine[parts[mine] == part] for part in range(len(PARTS)))
        train = _few(labels, train, clients.shots, "shots", seed, name)
        validation = _few(labels, validation, clients.held, "validation shots", seed, name)
        domains = sorted(set(table.domains[mine].tolist()))
        domain = domains[0] if len(domains) == 1 else ""
        apart = _apart(validation, clients.calibration_ratio or 0.0, units, seed, name)
        validation = validation[~np.isin(validation, apart)] if len(apart) else validation
        member = Member(name, domain, train, validation, test, apart)
        only = name.startswith(MARKED)  # rows of one part, and no other
        _check_member(member, (0, 0, 1) if only else clients.ratios, len(mine))
        made.add(member)
    for name in whole:
        if name not in made and name not in table.domains:
            raise unknown("domain or client", name, {*made, *table.domains.tolist()} - {""})
    return Division(made, int(later.sum()), order[parts[order] == len(PARTS)])


def _marked(table: Table, whole: Sequence[str]) -> Table:
    """With the rows of a mark as a domain, where `whole` names it, as "split:test"."""
    for name in whole:
        if not name.startswith(MARKED):
            continue
        mine = np.asarray(table.splits) == name.removeprefix(MARKED)
        if name != f"{MARKED}{PARTS[-1]}" or not mine.any():
            raise DataError(
                f'{name!r} names no rows that the data marks itself; "{MARKED}test" is for data '
                "with a test part, and other targets are domains or clients"
            )
        columns = (table.clients, table.splits, table.content, table.groups)
        domains = np.where(mine, name, table.domains)
        table = Listing(table.classes, table.labels, domains, *columns)
    return table


def _units(content: Ints, groups: Strings | None) -> Strings:
    """(rows,) what stays together when some are set aside: a group, or equal images."""
    alike = np.char.mod("\x1f%d", content)  # no name of a group begins so
    return alike if groups is None else np.where(groups == "", alike, groups)


def _apart(rows: Ints, share: float, units: Strings, seed: int, name: str) -> Ints:
    """A share of the validation rows, whole groups and equal images together."""
    if not share or len(set(units[rows].tolist())) < 2:
        return rows[:0]
    size = int(Fraction(str(share)).limit_denominator(1000) * len(rows))
    chosen = splits.some(rows, size, units, numbers("calibration", seed, name))
    return rows[np.isin(rows, chosen)]


def _check_groups(groups: Strings, pools: Strings, kept: NDArray[np.bool_]) -> None:
    """A group at two sites would be in two parts: they are parted on their own."""
    seen: dict[str, str] = {}
    for name, pool in zip(groups[kept].tolist(), pools[kept].tolist(), strict=True):
        if name and seen.setdefault(name, pool) != pool:
            raise DataError(
                f"the group {name!r} has rows at {seen[name]!r} and at {pool!r}, which are parted "
                "on their own; leave it to one of them, or give it two names if it is two"
            )


def _kept(table: Table, clients: Clients, whole: Sequence[str]) -> NDArray[np.bool_]:
    """The rows that take part: of the chosen domains, and of those that stay whole."""
    for name in clients.domains:
        if name not in table.domains:
            raise unknown("domain", name, set(table.domains.tolist()))
    if not clients.domains:
        return np.ones(len(table.labels), dtype=np.bool_)
    return np.isin(table.domains, (*clients.domains, *whole))


def _groups(order: Ints, group: Ints, count: int) -> Iterator[Ints]:
    """The rows of each group, in the given order."""
    together = order[np.argsort(group[order], kind="stable")]
    ends = np.cumsum(np.bincount(group[order], minlength=count)).tolist()
    return (together[first:end] for first, end in pairwise([0, *ends]))


def _checked(table: Table, clients: Clients) -> Ints:
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
        raise DataError(
            f"label {wrong} has no class: there are {len(table.classes)} classes, counted from 0"
        )
    if not counts.all():
        empty = table.classes[int(np.argmin(counts))]
        raise DataError(f"class {empty!r} has no rows; add images or leave it out of the classes")
    if clients.partition in ("domain", "domain-dirichlet"):
        own = "own" if (np.asarray(table.clients) != "").all() else "dirichlet"
        others = f"{own}: --set clients.partition={own} --set protocol=own-test"
        _check_column("domain", table.domains, clients.partition, others)
    if clients.partition == "own":
        _check_column(
            "client", table.clients, clients.partition, '"domain", "dirichlet", "pathological"'
        )
    return labels


def _check_column(kind: str, column: Strings, by: str, others: str) -> None:
    if bare := int((np.asarray(column) == "").sum()):
        raise DataError(
            f'{bare} of {len(column)} rows have no {kind}, so clients cannot be made by "{by}"; '
            f"give every row a {kind} or make clients by {others}"
        )


def _pools(table: Table, clients: Clients, whole: Sequence[str]) -> Strings:
    """What is parted as a whole: a domain, one of the data's own clients, or everything."""
    if clients.partition in ("domain", "domain-dirichlet"):
        return table.domains
    nobody = np.broadcast_to(np.array(""), len(table.labels))
    others = table.clients if clients.partition == "own" else nobody
    if not whole:
        return others
    apart = np.isin(table.domains, list(whole))
    if both := set(whole) & set(others[~apart].tolist()):
        raise DataError(f"{min(both)!r} is both a domain and a client; rename one of them")
    return np.where(apart, table.domains, others)


def _members(clients: Clients, pool: str) -> list[str]:
    stem = pool if clients.partition == "domain-dirichlet" else "client"
    return [f"{stem}-{index}" for index in range(clients.count)]


def _few(labels: Ints, rows: Ints, shots: int, purpose: str, seed: int, name: str) -> Ints:
    """At most so many rows of each class, or all."""
    if not shots:
        return rows
    return rows[splits.first_of_each(labels[rows], shots, numbers(purpose, seed, name))]


def _check_trained(classes: tuple[str, ...], trained: Ints) -> None:
    counts = np.bincount(trained, minlength=len(classes))
    if not counts.all():
        raise DataError(
            f"class {classes[int(np.argmin(counts))]!r} has no training rows to take shots from; "
            "add images of it, mark some as train, or set a larger share of train"
        )


def _check_member(member: Member, shares: tuple[float, float, float], rows: int) -> None:
    for part, share in zip(PARTS, shares, strict=True):
        if share and not len(getattr(member, part)):
            raise DataError(
                f"client {member.id!r} has no {part} rows ({rows} rows in all, shares "
                f"{list(shares)}); give it more images, set other shares, make fewer clients, or "
                "leave it out by naming the others: --set 'clients.domains=[…]'"
            )
