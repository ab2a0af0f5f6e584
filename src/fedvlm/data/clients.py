"""Assign samples to clients: the settings of a federation and every way to partition a pool of samples."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from fedvlm.core.schema import COUNT, FRACTION, NON_NEGATIVE, POSITIVE, list_field, ranged_field, read_fields
from fedvlm.data.splits import SPLITS, Floats, Ints
from fedvlm.errors import SettingsError
from fedvlm.seeds import numbers

MAX_VAL_SHOTS = 4  # validation samples per class in few-shot runs, as in CoOp
SHARDS_PER_CLIENT = 2  # as in the paper on federated averaging
FINE_ALPHA = 10.0  # concentration within a superclass, as in the public code of FedOTP
MAX_DIRICHLET_DRAWS = 1000  # attempts at a Dirichlet draw that gives every client enough samples
PartitionKind = Literal[
    "domain", "own", "iid", "shards", "dirichlet", "pathological", "domain-dirichlet", "coarse", "coarse-dirichlet"
]


@dataclass(frozen=True)
class Clients:
    """How samples become clients, and each client's samples train, validation and test."""

    partition: PartitionKind = "domain"  # own: the data's own client column (writers, sites)
    # number of clients where samples are assigned; for domain-dirichlet per domain
    count: int = ranged_field(10, COUNT)
    alpha: float = ranged_field(0.3, POSITIVE)  # concentration of the Dirichlet draw of each class over clients
    min_samples: int = ranged_field(10, COUNT)  # training samples that every Dirichlet client has at least
    shots: int = ranged_field(0, NON_NEGATIVE)  # training samples per class and client; 0: all
    # validation samples per class and client; default: as many as shots, at most 4
    val_shots: int | None = ranged_field(None, NON_NEGATIVE)
    ratios: tuple[float, float, float] = (0.6, 0.2, 0.2)  # train, validation, test
    # fraction of the validation samples kept for calibration; own data: a third, other data: none
    calibration_ratio: float | None = ranged_field(None, FRACTION)
    domains: tuple[str, ...] = list_field()  # domains whose samples become clients; empty: all
    # fraction kept as public samples of no client, for methods that adapt to a reference set
    public_ratio: float = ranged_field(0.0, FRACTION)

    def __post_init__(self) -> None:
        read_fields("clients", self)
        ratios = list(self.ratios)
        if min(ratios) < 0:
            raise SettingsError(f"clients.ratios must not be negative, got {ratios}")
        if ratios[0] == 0:
            raise SettingsError(f"clients.ratios must be above 0 for train, got {ratios}")
        if not abs(sum(ratios) - 1) < 1e-9:
            raise SettingsError(f"clients.ratios must sum to 1, got {ratios}, which sum to {sum(ratios):g}")

    @property
    def n_val_shots(self) -> int:
        """Validation samples per class and client; 0 means all."""
        return min(self.shots, MAX_VAL_SHOTS) if self.val_shots is None else self.val_shots


# of CIFAR-100
SUPERCLASSES: dict[str, list[str]] = json.loads((Path(__file__).parent / "superclasses.json").read_text("utf-8"))
SUPERCLASS_OF = {class_name: name for name, members in SUPERCLASSES.items() for class_name in members}


def superclasses(classes: Sequence[str]) -> list[str]:
    """Return the CIFAR-100 superclass of each class."""
    for name in classes:
        if name not in SUPERCLASS_OF:
            remedy = 'set clients.partition to "dirichlet" or "pathological"'
            raise SettingsError(f"class {name!r} has no superclass: this partition is for CIFAR-100; {remedy}")
    return [SUPERCLASS_OF[name] for name in classes]


@dataclass(frozen=True)
class Pool:
    """Samples that are assigned together: a domain or the whole data set."""

    name: str
    title: str  # for messages
    labels: Ints  # (samples,)
    parts: Ints  # (samples,) numbers of SPLITS


def assign_clients(pool: Pool, settings: Clients, classes: Sequence[str], seed: int) -> Ints:
    """Return the client of each sample of a pool, counted from 0."""
    rng = numbers(settings.partition, seed, pool.name)
    count = settings.count
    if settings.partition == "pathological":
        return pathological(len(classes), count, rng)[pool.labels]
    if settings.partition == "iid":
        return _assign_per_split(pool.parts, lambda rows: _assign_evenly(rows, count, rng))
    if settings.partition == "shards":
        return assign_shards(pool, count, rng)
    if settings.partition == "coarse":
        return assign_superclasses(pool, superclasses(classes), count, rng)
    present = np.unique(pool.labels)
    if settings.partition == "coarse-dirichlet":
        groups = superclasses(classes)
        alpha = settings.alpha
        return dirichlet(pool, settings, rng, lambda: two_level_proportions(groups, count, alpha, rng)[present])
    concentration = np.full(count, settings.alpha)
    return dirichlet(pool, settings, rng, lambda: rng.dirichlet(concentration, size=len(present)))


def _assign_per_split(parts: Ints, assign: Callable[[Ints], Ints]) -> Ints:
    """Assign train, validation and test samples separately, so that each client gets some of each."""
    owner = np.empty(len(parts), dtype=np.int64)
    for part in range(len(SPLITS)):
        rows = np.flatnonzero(parts == part)
        owner[rows] = assign(rows)
    return owner


def _assign_evenly(rows: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Assign at random; client sizes differ by at most one."""
    owner = np.empty(len(rows), dtype=np.int64)
    owner[rng.permutation(len(rows))] = np.arange(len(rows)) % count
    return owner


def pathological(classes: int, clients: int, rng: np.random.Generator) -> Ints:
    """Return the client of each class: classes shuffled, round(classes / clients) each, the rest to the last.

    As in the code of FedOTP: 37 classes for 10 clients are nine times four and one.
    """
    classes_per_client = round(classes / clients)
    if classes_per_client < 1 or classes_per_client * (clients - 1) >= classes:
        raise SettingsError(
            f"{classes} classes cannot be assigned to {clients} clients without overlap: "
            f"round({classes}/{clients}) = {classes_per_client} classes each leave none for the last; "
            "set another clients.count"
        )
    owner = np.empty(classes, dtype=np.int64)
    owner[rng.permutation(classes)] = np.minimum(np.arange(classes) // classes_per_client, clients - 1)
    return owner


def assign_shards(pool: Pool, count: int, rng: np.random.Generator) -> Ints:
    """Sort samples by class, cut them into equal shards and give SHARDS_PER_CLIENT of them to every client.

    A shard is the same stretch of train, validation and test, so a client is tested on the classes it trains on.
    """
    order = rng.permutation(SHARDS_PER_CLIENT * count) % count  # the client of each shard

    def assign_samples(rows: Ints) -> Ints:
        place = np.empty(len(rows), dtype=np.int64)
        place[np.argsort(pool.labels[rows], kind="stable")] = np.arange(len(rows))
        return order[place * len(order) // max(1, len(rows))]

    return _assign_per_split(pool.parts, assign_samples)


def assign_superclasses(pool: Pool, groups: Sequence[str], count: int, rng: np.random.Generator) -> Ints:
    """Give one superclass to each client, or several if there are fewer clients.

    The clients of a superclass share all its classes evenly, as in figure A5 of FedOTP.
    """
    names, group = np.unique(groups, return_inverse=True)
    spread = np.arange(max(count, len(names)))
    superclass, client = spread * len(names) // len(spread), spread * count // len(spread)

    def assign_samples(rows: Ints) -> Ints:
        owner = np.empty(len(rows), dtype=np.int64)
        for label in np.unique(pool.labels[rows]):
            in_class = np.flatnonzero(pool.labels[rows] == label)
            superclass_clients = client[superclass == group[label]]
            turn = _assign_evenly(in_class, len(superclass_clients), rng) + label
            owner[in_class] = superclass_clients[turn % len(superclass_clients)]
        return owner

    return _assign_per_split(pool.parts, assign_samples)


def two_level_proportions(groups: Sequence[str], count: int, alpha: float, rng: np.random.Generator) -> Floats:
    """(classes, clients): draw the fraction of each class that each client gets.

    A client draws the proportions of the superclasses (alpha), and within each those of its classes (FINE_ALPHA).
    """
    names, group = np.unique(groups, return_inverse=True)
    proportions = rng.dirichlet(np.full(len(names), alpha), size=count)[:, group]
    for number in range(len(names)):
        in_group = np.flatnonzero(group == number)
        proportions[:, in_group] *= rng.dirichlet(np.full(len(in_group), FINE_ALPHA), size=count)
    proportions = proportions.T + 1e-300  # a class that no client drew goes to all
    return np.asarray(proportions / proportions.sum(1, keepdims=True), dtype=np.float64)


def dirichlet(pool: Pool, settings: Clients, rng: np.random.Generator, draw: Callable[[], Floats]) -> Ints:
    """Return the client of each sample by one draw of proportions (classes present, clients) for all splits.

    Draw again until every client has `min_samples` training samples and a sample of each split that exists.
    """
    labels, parts, clients = pool.labels, pool.parts, settings.count
    pairs = product(np.unique(labels), range(len(SPLITS)))
    cells = [np.flatnonzero((labels == label) & (parts == part)) for label, part in pairs]
    sizes = np.bincount(parts, minlength=len(SPLITS))
    min_counts = np.array([settings.min_samples, 1, 1]) * (sizes > 0)
    if (short := sizes < min_counts * clients).any():
        part = int(np.argmax(short))
        raise SettingsError(
            f"{pool.title}: {sizes[part]} {SPLITS[part]} samples are too few for {clients} clients with at least "
            f"{min_counts[part]} each; set a smaller clients.count or clients.min_samples"
        )
    for _ in range(MAX_DIRICHLET_DRAWS):
        owner = np.empty(len(labels), dtype=np.int64)
        proportions = draw()
        for index, cell in enumerate(cells):
            ends = np.floor(np.cumsum(proportions[index // len(SPLITS)])[:-1] * len(cell) + 0.5)
            mixed = rng.permutation(cell)
            owner[mixed] = np.searchsorted(ends, np.arange(len(cell)), side="right")
        counts = np.zeros((clients, len(SPLITS)), dtype=np.int64)
        np.add.at(counts, (owner, parts), 1)
        if (counts >= min_counts).all():
            return owner
    raise SettingsError(
        f"{pool.title}: in {MAX_DIRICHLET_DRAWS} draws with alpha = {settings.alpha} some of {clients} clients always "
        f"had fewer than {settings.min_samples} training samples or none of a split; set a larger clients.alpha, a "
        "smaller clients.min_samples or a smaller clients.count"
    )
