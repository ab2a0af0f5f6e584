"""Which client has which row of a pool, for every way in which a pool is dealt."""

from collections.abc import Sequence

import numpy as np

from fedvlm.data import splits
from fedvlm.data.clients import Clients
from fedvlm.data.splits import SPLITS, Ints
from fedvlm.data.superclasses import superclasses
from fedvlm.seeds import numbers

SHARDS_PER_CLIENT = 2  # per client, as the paper on federated averaging has it
FINE_ALPHA = 10.0  # concentration within a superclass, as the public code of FedOTP has it


def assign_clients(
    labels: Ints,
    parts: Ints,
    clients: Clients,
    classes: Sequence[str],
    seed: int,
    pool: str,
    title: str,
) -> Ints:
    """The client of each row of a pool, counted from 0."""
    drawn = numbers(clients.partition, seed, pool)
    count = clients.count
    if clients.partition == "pathological":
        return splits.pathological(len(classes), count, drawn)[labels]
    if clients.partition == "iid":
        return _assign_per_split(parts, lambda rows: _assign_evenly(rows, count, drawn))
    if clients.partition == "shards":
        return assign_shards(labels, parts, count, drawn)
    if clients.partition == "coarse":
        return assign_superclasses(labels, parts, superclasses(classes), count, drawn)
    groups = superclasses(classes) if clients.partition == "coarse-dirichlet" else []

    def draw(rng: np.random.Generator) -> splits.Floats:
        return two_level_proportions(groups, count, clients.alpha, rng)[np.unique(labels)]

    return splits.dirichlet(
        labels,
        parts,
        count,
        clients.alpha,
        clients.min_samples,
        drawn,
        title,
        draw if groups else None,
    )


def _assign_per_split(parts: Ints, assign: splits.Assigner) -> Ints:
    """Train, validation and test rows dealt by themselves, so that each client has its part."""
    owner = np.empty(len(parts), dtype=np.int64)
    for part in range(len(SPLITS)):
        rows = np.flatnonzero(parts == part)
        owner[rows] = assign(rows)
    return owner


def _assign_evenly(rows: Ints, count: int, rng: np.random.Generator) -> Ints:
    """At random, no client more than one row ahead of another."""
    owner = np.empty(len(rows), dtype=np.int64)
    owner[rng.permutation(len(rows))] = np.arange(len(rows)) % count
    return owner


def assign_shards(labels: Ints, parts: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Rows sorted by class are cut into equal shards, of which every client is dealt SHARDS.

    A shard is the same stretch of train, validation and test, so that a client is tested on the
    classes it trains on.
    """
    order = rng.permutation(SHARDS_PER_CLIENT * count) % count  # the client of each shard

    def assign_samples(rows: Ints) -> Ints:
        place = np.empty(len(rows), dtype=np.int64)
        place[np.argsort(labels[rows], kind="stable")] = np.arange(len(rows))
        return order[place * len(order) // max(1, len(rows))]

    return _assign_per_split(parts, assign_samples)


def assign_superclasses(labels: Ints, parts: Ints, groups: Sequence[str], count: int, rng: np.random.Generator) -> Ints:
    """A superclass to each client, or several to each if clients are fewer.

    The clients of a superclass share all its classes evenly, as figure A5 of FedOTP has it.
    """
    names, group = np.unique(groups, return_inverse=True)
    spread = np.arange(max(count, len(names)))
    superclass, client = spread * len(names) // len(spread), spread * count // len(spread)

    def assign_samples(rows: Ints) -> Ints:
        owner = np.empty(len(rows), dtype=np.int64)
        for label in np.unique(labels[rows]):
            in_class = np.flatnonzero(labels[rows] == label)
            those = client[superclass == group[label]]
            owner[in_class] = those[(_assign_evenly(in_class, len(those), rng) + label) % len(those)]
        return owner

    return _assign_per_split(parts, assign_samples)


def two_level_proportions(groups: Sequence[str], count: int, alpha: float, rng: np.random.Generator) -> splits.Floats:
    """(classes, clients): what share of a class each client has.

    A client draws how much it likes each superclass (alpha), and in it each class (FINE).
    """
    names, group = np.unique(groups, return_inverse=True)
    proportions = rng.dirichlet(np.full(len(names), alpha), size=count)[:, group]
    for number in range(len(names)):
        in_group = np.flatnonzero(group == number)
        proportions[:, in_group] *= rng.dirichlet(np.full(len(in_group), FINE_ALPHA), size=count)
    proportions = proportions.T + 1e-300  # a class that nobody likes is everyone's
    return np.asarray(proportions / proportions.sum(1, keepdims=True), dtype=np.float64)
