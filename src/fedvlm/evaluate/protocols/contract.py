"""The interface of a protocol: its trainings, its table, and the samples that a training may adapt to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedvlm.errors import DataError, SettingsError, unknown_name
from fedvlm.evaluate.metrics import Results, Table
from fedvlm.plugins import add_entry, load_outside

if TYPE_CHECKING:  # tables of finished runs are made without torch
    from fedvlm.core import Method
    from fedvlm.data.partition import Partition
    from fedvlm.data.table import EmbeddedTable

__all__ = [
    "Participants",
    "Rules",
    "Training",
    "TrainingResults",
    "Weights",
    "make_protocol",
    "protocols",
    "register",
    "uniform_weights",
]

Weights = Mapping[tuple[str, str], float]  # of (training, client) in a column
Participants = Mapping[str, tuple[Sequence[str], Sequence[str]]]  # by training: who trains, who is unseen
GROUP = "fedvlm.protocols"
NEW_CLASS_PROTOCOLS = ("base-to-new", "cross-data-set")  # they test on classes that nobody trained on


@dataclass(frozen=True)
class Training:
    """One training of a protocol."""

    name: str
    train: tuple[str, ...]
    unseen: tuple[str, ...]


TrainingResults = Mapping[str, tuple[Training, Results]]  # by the name of the training


class Rules(Protocol):
    """A protocol: a frozen dataclass whose fields are settings of a run with the same names."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]
    summary: ClassVar[str]  # one line
    every_round: ClassVar[bool]  # measure every metric in every round, not only at the end

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[Training]:
        """Return the trainings for clients by id, with their domains."""
        ...

    def table(self, domains: Mapping[str, str], done: TrainingResults, generalises: bool) -> Table:
        """Return the columns of one seed; a method that trains but shares nothing does not generalise."""
        ...

    def weights(self, participants: Participants, generalises: bool) -> dict[str, Weights]:
        """Return the weights of the columns that are accuracies, for participants with test samples."""
        ...


PROTOCOLS: dict[str, type[Any]] = {}
T = TypeVar("T", bound=type[Any])


def register(rules: T) -> T:
    """Check a protocol and add it to the registry."""
    name = getattr(rules, "name", None)
    if not is_dataclass(rules) or not isinstance(name, str):
        remedy = "put @dataclass(frozen=True) below @register and add one"
        raise SettingsError(f"protocol {rules.__name__}: it is a frozen dataclass with a `name`; {remedy}")
    for verb in ("trainings", "table", "weights", "summary", "every_round"):
        if not hasattr(rules, verb):
            raise SettingsError(f"protocol {rules.__name__}: no {verb}; add it")
    add_entry(PROTOCOLS, "protocol", name, rules)
    return rules


def protocols() -> dict[str, type[Any]]:
    """Return all protocols: our own and those of outside packages."""
    load_outside(GROUP)
    return dict(PROTOCOLS)


def make_protocol(name: str, **settings: Any) -> Rules:
    """Make a protocol by name; refuse a setting of another protocol unless it is empty."""
    if name not in PROTOCOLS:
        load_outside(GROUP)
    if name not in PROTOCOLS:
        raise unknown_name("protocol", name, PROTOCOLS)
    names_of = {protocol: {field.name for field in fields(rules)} for protocol, rules in PROTOCOLS.items()}
    setting_names = names_of[name]
    for key, value in settings.items():
        if value and key not in setting_names:
            owners = [repr(protocol) for protocol, names in names_of.items() if key in names]
            shown = list(value) if isinstance(value, tuple) else value
            problem = f"{key} = {shown} is for protocol = {' or '.join(owners)}, not {name!r}"
            raise SettingsError(f"{problem}; leave one of them out")
    made: Rules = PROTOCOLS[name](**{key: settings[key] for key in settings.keys() & setting_names})
    return made


def uniform_weights(training: str, ids: Sequence[str]) -> Weights:
    """Weight every client equally."""
    return {(training, id): 1 / len(ids) for id in ids}


def has_reference(method: Method) -> bool:
    return method.traits.training.reference is not None


def reference_samples(method: Method, partition: Partition, training: Training) -> NDArray[np.int64]:
    """Return the unlabelled samples that a method with a `reference` adapts to; none for other methods.

    "public": the unseen clients' rows that nobody is tested on, and rows set aside; "target": test
    rows, which makes the method transductive.
    """
    if not has_reference(method):
        return np.zeros(0, np.int64)
    members = partition.clients
    unseen = [id for id in training.unseen if id in members]  # without the virtual client of all test samples
    if method.traits.training.reference == "target":
        rows = [members[id].test for id in unseen or training.train]
    else:
        rows = [part for id in unseen for part in (members[id].train, members[id].validation)]
        rows.append(partition.public)
    return np.sort(np.concatenate(rows))


def check_training_data(method: Method, table: EmbeddedTable, partition: Partition, training: Training) -> None:
    """Refuse clients and reference samples that a method cannot use, before any work."""
    min_samples = method.traits.training.min_samples
    for id in training.train:
        if (count := len(partition.clients[id].train)) < min_samples:
            needs = f"{method.name} needs at least {min_samples} at every client; give it more samples, or leave it out"
            raise DataError(f"client {id} has {count} training samples, but {needs}")
    if not has_reference(method):
        return
    rows = reference_samples(method, partition, training)
    if not len(rows):
        raise SettingsError(
            f"{method.name} adapts to an unlabelled reference set, and there is none: no client is "
            "unseen and no rows are set aside; set clients.public_ratio to a share of the rows, "
            "as 0.1, or method.reference = 'target' (transductive)"
        )
    if method.traits.training.reference == "public":
        everyone = {*training.train, *training.unseen} & partition.clients.keys()
        tests = [partition.clients[id].test for id in sorted(everyone)]
        check_disjoint(table.content, rows, np.concatenate(tests))


def check_disjoint(content: Sequence[str], rows: NDArray[np.int64], test: NDArray[np.int64]) -> None:
    """Refuse a public reference set that shares an image with a test set."""
    tested = {content[i]: i for i in test.tolist()}
    for row in rows.tolist():
        if content[row] in tested:
            raise DataError(
                f"row {row} of the reference set is the same image as the test row "
                f"{tested[content[row]]}; take it out of either, or set reference = 'target', "
                "which marks the method as transductive"
            )
