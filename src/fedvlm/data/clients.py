"""Settings: how rows become clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedvlm.core.schema import COUNT, FRACTION, NON_NEGATIVE, POSITIVE, list_field, ranged_field, read_fields
from fedvlm.data import splits
from fedvlm.data.splits import SPLITS, Ints
from fedvlm.errors import SettingsError
from fedvlm.seeds import numbers

MAX_VAL_SHOTS = 4  # validation rows of a class at most, where training rows are counted: CoOp's
By = Literal[
    "domain",
    "own",
    "iid",
    "shards",
    "dirichlet",
    "pathological",
    "domain-dirichlet",
    "coarse",
    "coarse-dirichlet",
]


@dataclass(frozen=True)
class Clients:
    partition: By = "domain"  # own: the data's own client column (writers, sites)
    # clients where rows are dealt; of each domain for domain-dirichlet
    count: int = ranged_field(10, COUNT)
    alpha: float = ranged_field(0.3, POSITIVE)  # Dirichlet concentration
    min_samples: int = ranged_field(10, COUNT)  # training rows a Dirichlet client has at least
    shots: int = ranged_field(0, NON_NEGATIVE)  # training rows per class and client; 0: all
    # likewise; left out: as many as shots, 4 at most
    val_shots: int | None = ranged_field(None, NON_NEGATIVE)
    ratios: tuple[float, float, float] = (0.6, 0.2, 0.2)  # train, validation, test
    calibration_ratio: float | None = ranged_field(
        None, FRACTION
    )  # share of validation rows set aside; own data: a third
    domains: tuple[str, ...] = list_field()  # whose rows become clients; empty: all
    public_ratio: float = ranged_field(
        0.0, FRACTION
    )  # share set aside as nobody's rows, for methods that adapt to a reference

    def __post_init__(self) -> None:
        read_fields("clients", self)
        ratios = self.ratios
        if min(ratios) < 0 or ratios[0] == 0 or not abs(sum(ratios) - 1) < 1e-9:
            raise SettingsError(
                f"clients.ratios = {list(ratios)} do not fit; they are above 0 for train, not "
                f"negative, and sum to 1, not {sum(ratios):g}"
            )

    @property
    def n_val_shots(self) -> int:
        """Validation rows per class and client, 0 for all: those who train on few choose on few."""
        return min(self.shots, MAX_VAL_SHOTS) if self.val_shots is None else self.val_shots


SUPERCLASSES = {
    "aquatic mammals": "beaver, dolphin, otter, seal, whale",
    "fish": "aquarium fish, flatfish, ray, shark, trout",
    "flowers": "orchid, poppy, rose, sunflower, tulip",
    "food containers": "bottle, bowl, can, cup, plate",
    "fruit and vegetables": "apple, mushroom, orange, pear, sweet pepper",
    "household electrical devices": "clock, keyboard, lamp, telephone, television",
    "household furniture": "bed, chair, couch, table, wardrobe",
    "insects": "bee, beetle, butterfly, caterpillar, cockroach",
    "large carnivores": "bear, leopard, lion, tiger, wolf",
    "large man-made outdoor things": "bridge, castle, house, road, skyscraper",
    "large natural outdoor scenes": "cloud, forest, mountain, plain, sea",
    "large omnivores and herbivores": "camel, cattle, chimpanzee, elephant, kangaroo",
    "medium-sized mammals": "fox, porcupine, possum, raccoon, skunk",
    "non-insect invertebrates": "crab, lobster, snail, spider, worm",
    "people": "baby, boy, girl, man, woman",
    "reptiles": "crocodile, dinosaur, lizard, snake, turtle",
    "small mammals": "hamster, mouse, rabbit, shrew, squirrel",
    "trees": "maple tree, oak tree, palm tree, pine tree, willow tree",
    "vehicles 1": "bicycle, bus, motorcycle, pickup truck, train",
    "vehicles 2": "lawn mower, rocket, streetcar, tank, tractor",
}
SUPERCLASS_OF = {class_name: name for name, members in SUPERCLASSES.items() for class_name in members.split(", ")}


def superclasses(classes: Sequence[str]) -> list[str]:
    """The superclass of each class; classes of other data have none."""
    for name in classes:
        if name not in SUPERCLASS_OF:
            raise SettingsError(
                f"class {name!r} has no superclass: clients by superclass are for CIFAR-100; "
                'make them by "dirichlet" or "pathological"'
            )
    return [SUPERCLASS_OF[name] for name in classes]


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
