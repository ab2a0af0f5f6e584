"""Settings and rows to a prepared run: who has which rows, who trains, and on what.

Nothing else divides rows for a run: the run itself, its audit, a deployed site and a client that
joins later all start from what is prepared here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.core import Frozen
from fedvlm.data.arrays import IN_MEMORY
from fedvlm.data.catalogue import catalogue
from fedvlm.data.clients import Clients
from fedvlm.data.descriptions import texts_by_client
from fedvlm.data.partition import ClientSplit, Partition, SampleList, make_partition
from fedvlm.data.table import EmbeddedTable
from fedvlm.engines.attacks import flip_labels
from fedvlm.engines.client import TrainingTerms, World, client_world
from fedvlm.engines.placement import with_device
from fedvlm.engines.state import POOLED_CLIENT
from fedvlm.errors import DataError
from fedvlm.evaluate.protocols import Training, contract
from fedvlm.evaluate.protocols.base_to_new import BaseToNew
from fedvlm.evaluate.protocols.own_test import EVERYONE
from fedvlm.evaluate.protocols.source_target import EVERY_DOMAIN
from fedvlm.machine import release_memory
from fedvlm.runner import halves, warm
from fedvlm.runner.load import check_needs
from fedvlm.runner.settings import Settings, attack_of
from fedvlm.storage.large_tensors import iterate_chunks

Ints = NDArray[np.int64]
CALIBRATION_RATIO = 1 / 3  # of the validation rows of own data: set aside, to promise coverage by


@dataclass(frozen=True)
class Prepared:
    """One seed of a run before anything is trained."""

    settings: Settings
    rows: EmbeddedTable
    seed: int
    partition: Partition
    frozen: Frozen
    new: "NewClasses | None" = None  # base-to-new: the classes nobody trains on
    all_class_samples: EmbeddedTable | None = None  # base-to-new: the rows of all classes, as they were given

    @property
    def source_samples(self) -> EmbeddedTable:
        """The rows it was prepared from."""
        return self.rows if self.all_class_samples is None else self.all_class_samples

    @cached_property
    def trainings(self) -> Sequence[Training]:
        return trainings_of(self.settings, self.partition.domains, self.seed)

    @cached_property
    def generalises(self) -> bool:
        """An unseen client of a method that trains but shares nothing has learnt nothing."""
        shared, _ = self.settings.method.init(self.frozen)
        return bool(shared) or self.settings.method.rounds == 0

    def check(self) -> None:
        """Refuses clients and reference rows that the method cannot work with."""
        for training in self.trainings:
            contract.check_training_data(self.settings.method, self.rows, self.partition, training)

    def reference(self, training: Training) -> Ints:
        """The unlabelled rows that the method adapts to in a training, if it does."""
        return contract.reference_samples(self.settings.method, self.partition, training)

    def world(self, training: Training) -> World:
        """All that one training works on."""
        members = self._members(training)
        texts = texts_by_client(self.rows.texts, self.partition.clients)
        world = self._world(members, texts, self.reference(training))
        return flip_labels(world, training.train)

    def _members(self, training: Training) -> Mapping[str, ClientSplit]:
        everyone = self.partition.clients
        plain = not (training.unseen or self.centralised)
        if plain and len(training.train) == len(everyone):
            return everyone  # which many clients take no memory in
        train = set(training.train)
        members = {id: member for id, member in everyone.items() if id in train}
        members |= {id: self._unseen(id) for id in training.unseen}
        if self.centralised:
            members[POOLED_CLIENT] = pool_members([members[id] for id in training.train])
        return members

    def new_world(self) -> World:
        """What the test rows of new classes are measured on, when all training is over."""
        assert self.new is not None
        new_prepared = replace(self, rows=self.new.rows, frozen=self.new.frozen)
        return new_prepared._world(self.new.members, {}, np.zeros(0, np.int64))

    def _unseen(self, id: str) -> ClientSplit:
        members = self.partition.clients
        return merge_test_samples(list(members.values())) if id == EVERYONE else members[id]

    @property
    def centralised(self) -> bool:
        """Whether the run is no federation: one client with the rows of all that train."""
        return self.settings.centralised or self.settings.method.traits.centralised

    def measured_training(self, training: Training) -> Training:
        """Who trains and who is only measured: if rows are pooled, all clients are."""
        if not self.centralised:
            return training
        return replace(training, train=(POOLED_CLIENT,), unseen=(*training.train, *training.unseen))

    def warm_world(self, training: Training) -> World:
        """The same as the one-shot method that gives the first head sees it."""
        first = self.settings.warm_start
        assert first is not None
        return replace(
            self.world(training),
            method=with_device(first, self.settings.device),
            x=self.rows.view(first.traits.needs),
        )

    def own_world(self, id: str, name: str = "", entropy: bool = False) -> World:
        """What one client works on, without a row of another; `name` is what it is called there."""
        name = name or id
        texts = texts_by_client(self.rows.texts, self.partition.clients)
        world = self._world(
            {name: self.partition.clients[id]},
            {name: texts[id]} if texts else {},
            np.zeros(0, np.int64),
        )
        return replace(client_world(world, name), secret_noise=entropy, details=False)

    def _world(self, members: Mapping[str, ClientSplit], texts: Mapping[str, Tensor], reference: Ints) -> World:
        terms = terms_of(self.settings, self.frozen, self.seed)
        return World(
            **{**vars(terms), "method": with_device(terms.method, self.settings.device)},
            x=self.rows.view(self.settings.method.traits.needs),
            y=torch.from_numpy(self.rows.labels),
            members=members,
            reference=reference,
            texts=texts,
            details=True,
        )


@dataclass(frozen=True)
class NewClasses:
    """The other half of the classes, and each client's test rows of them."""

    rows: EmbeddedTable
    frozen: Frozen
    members: Mapping[str, ClientSplit]


def prepare(settings: Settings, rows: EmbeddedTable, seed: int) -> Prepared:
    clients = settings.clients
    if rows.encoder == IN_MEMORY or own_data(settings):
        clients = with_calibration(clients)
    if settings.protocol == BaseToNew.name:
        base, new_half = halves.split_classes(rows)
        partition = _partition_half(base, clients, seed, undivided_targets(settings))
        dealt_new = _partition_half(new_half, halves.new_half_clients(clients), seed, ())
        members = halves.new_test_members(base, dealt_new, partition.clients)
        new = NewClasses(new_half, frozen_of(new_half, seed), members)
        return Prepared(settings, base, seed, partition, frozen_of(base, seed), new, rows)
    partition = make_partition(rows, clients, seed, undivided_targets(settings))
    release_memory()  # of many rows, what dealing them took
    return Prepared(settings, rows, seed, partition, frozen_of(rows, seed))


def _partition_half(rows: EmbeddedTable, clients: Clients, seed: int, undivided: Sequence[str]) -> Partition:
    table, indices = halves.half_table(rows)
    return halves.to_full_indices(make_partition(table, clients, seed, undivided), indices)


def own_data(settings: Settings) -> bool:
    """Whether a run is on a user's own images; experiments on known data keep their splits."""
    return not settings.encoder.startswith("store:") and settings.data not in catalogue()


def with_calibration(clients: Clients) -> Clients:
    """A third of the validation rows, unless a share is named."""
    return clients if clients.calibration_ratio is not None else replace(clients, calibration_ratio=CALIBRATION_RATIO)


def pool_members(members: Sequence[ClientSplit]) -> ClientSplit:
    """All their training and validation rows as those of one client; nobody tests it."""
    train, validation = (
        np.sort(np.concatenate([getattr(member, part) for member in members])) for part in ("train", "validation")
    )
    return ClientSplit(POOLED_CLIENT, "", train, validation, np.zeros(0, np.int64))


def merge_test_samples(members: Sequence[ClientSplit]) -> ClientSplit:
    """A client of all their test rows, and no others."""
    none = np.zeros(0, np.int64)
    return ClientSplit(EVERYONE, "", none, none, np.sort(np.concatenate([m.test for m in members])))


def undivided_targets(settings: Settings) -> tuple[str, ...]:
    """What stays together however rows are dealt: the targets, if they are named."""
    return () if settings.target == (EVERY_DOMAIN,) else settings.target


def prepare_client(
    settings: Settings, rows: EmbeddedTable, id: str, seed: int, frozen: Frozen | None = None
) -> Prepared:
    """The same for a client with rows of its own, which need not be of every class."""
    present, labels = np.unique(rows.labels, return_inverse=True)
    classes = tuple(rows.classes[i] for i in present)
    client_column = np.full(len(labels), id)
    table = SampleList(classes, labels, rows.domains, client_column, rows.splits, rows.content, rows.groups)
    partition = make_partition(table, replace(settings.clients, partition="own"), seed)
    return Prepared(settings, rows, seed, partition, frozen or frozen_of(rows, seed))


def trainings_of(settings: Settings, domains: Mapping[str, str], seed: int) -> list[Training]:
    """The trainings of one seed; of the clients nothing but their domains has to be known."""
    return settings.rules().trainings(domains, seed)


def terms_of(settings: Settings, frozen: Frozen, seed: int) -> TrainingTerms:
    metrics = settings.rules().every_round
    attack = attack_of(settings)
    return TrainingTerms(settings.method, frozen, seed, settings.channel, metrics=metrics, attack=attack)


def frozen_of(rows: EmbeddedTable, seed: int) -> Frozen:
    return Frozen(
        rows.classes,
        rows.x.shape[1],
        rows.scale,
        rows.text,
        seed,
        rows.text_tower,
        rows.image_tower,
        rows.descriptions,
    )


def frozen_from(about: Mapping[str, Any], text: Tensor | None, seed: int, descriptions: Tensor | None = None) -> Frozen:
    """What a manifest, a saved classifier or a site tells of classes and encoder; no towers."""
    classes = tuple(about["classes"])
    scale = float(about["scale"])
    return Frozen(classes, int(about["dim"]), scale, text, seed, descriptions=descriptions)


def template_of(rows: Frozen | EmbeddedTable) -> dict[str, str]:
    """What a manifest, a saved classifier and a site tell of the words around a prompt."""
    return {} if rows.text_tower is None else {"template": rows.text_tower.template}


def check_samples(settings: Settings, rows: EmbeddedTable) -> None:
    """Refuses rows no method can use, before any work."""
    # A sum is finite only if all its numbers are, and takes no second copy of the rows.
    sums = torch.cat([part.sum(dim=1) for _, part in iterate_chunks(rows.x)])
    bad = (~sums.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"{len(bad)} embeddings hold NaN or infinite numbers, the first in row {bad[0]}; "
            "encode them again, or leave those rows out"
        )
    if len(rows.classes) < 2:
        raise DataError(f"there is one class only, {rows.classes[0]!r}; a classifier takes two or more")
    outside = [i for i in np.unique(rows.labels).tolist() if not 0 <= i < len(rows.classes)]
    if outside:
        raise DataError(
            f"label {outside[0]} is outside the {len(rows.classes)} classes (0 to "
            f"{len(rows.classes) - 1}); correct the labels, or name every class"
        )
    check_needs(settings.method, rows.encoder, rows.offers())
    ready = frozen_of(rows, settings.seeds[0])
    settings.method.init(ready)  # a method may refuse the dimension
    if settings.protocol == BaseToNew.name:
        halves.split_classes(rows)
        halves.check_new_classes(settings.method, ready)
    if settings.warm_start is not None:
        check_needs(settings.warm_start, rows.encoder, rows.offers())
        warm.check_warm_start(settings.warm_start, settings.method, ready)
