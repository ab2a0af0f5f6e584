"""Settings and rows to a prepared run: who has which rows, who trains, and on what.

Nothing else divides rows for a run: the run itself, its audit, a deployed site and a client that
joins later all start from what is prepared here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.core import Frozen, HeadProvider, Method
from fedvlm.data.arrays import IN_MEMORY
from fedvlm.data.catalogue import catalogue
from fedvlm.data.clients import Clients
from fedvlm.data.descriptions import texts_by_client
from fedvlm.data.partition import ClientSplit, Partition, SampleList, make_partition
from fedvlm.data.table import EmbeddedTable, rank_digests
from fedvlm.engines.attacks import flip_labels
from fedvlm.engines.client import TrainingTerms, World, client_world, measure
from fedvlm.engines.placement import with_device
from fedvlm.engines.state import POOLED_CLIENT
from fedvlm.errors import DataError, SettingsError
from fedvlm.evaluate.protocols import Training, contract
from fedvlm.evaluate.protocols.base_to_new import NEW_PREFIX, BaseToNew
from fedvlm.evaluate.protocols.own_test import EVERYONE
from fedvlm.evaluate.protocols.source_target import EVERY_DOMAIN
from fedvlm.machine import release_memory
from fedvlm.record import Record
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
        return self.settings.centralised or self.settings.method.traits.privacy.centralised

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
        base, new_half = split_classes(rows)
        partition = _partition_half(base, clients, seed, undivided_targets(settings))
        dealt_new = _partition_half(new_half, new_half_clients(clients), seed, ())
        members = new_test_members(base, dealt_new, partition.clients)
        new = NewClasses(new_half, frozen_of(new_half, seed), members)
        return Prepared(settings, base, seed, partition, frozen_of(base, seed), new, rows)
    partition = make_partition(rows, clients, seed, undivided_targets(settings))
    release_memory()  # of many rows, what dealing them took
    return Prepared(settings, rows, seed, partition, frozen_of(rows, seed))


def _partition_half(rows: EmbeddedTable, clients: Clients, seed: int, undivided: Sequence[str]) -> Partition:
    table, indices = half_table(rows)
    return to_full_indices(make_partition(table, clients, seed, undivided), indices)


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
        split_classes(rows)
        check_new_classes(settings.method, ready)
    if settings.warm_start is not None:
        check_needs(settings.warm_start, rows.encoder, rows.offers())
        check_warm_start(settings.warm_start, settings.method, ready)


MIN_CLASSES = 4  # classes: two in each half, or there is nothing to tell apart


def split_classes(rows: EmbeddedTable) -> tuple[EmbeddedTable, EmbeddedTable]:
    """The same rows twice, each with the labels of one half and -1 for rows of the other."""
    count = len(rows.classes)
    if count < MIN_CLASSES:
        raise DataError(
            f"base-to-new takes {MIN_CLASSES} classes or more, and {rows.name} has {count}; take "
            "protocol = 'own-test', or data with more classes"
        )
    middle = -(-count // 2)
    return _half(rows, 0, middle), _half(rows, middle, count)


def _half(rows: EmbeddedTable, first: int, last: int) -> EmbeddedTable:
    part = slice(first, last)
    labels = rows.labels
    return replace(
        rows,
        classes=rows.classes[part],
        labels=np.where((labels >= first) & (labels < last), labels - first, -1),
        text=None if rows.text is None else rows.text[part],
        text_tower=_tower(rows.text_tower, part),
        descriptions=None if rows.descriptions is None else rows.descriptions[part],
        texts={id: client_texts[part] for id, client_texts in rows.texts.items()},
    )


def _tower(tower: Any, part: slice) -> Any:
    """A text tower for some of its classes."""
    if tower is None:
        return None
    return replace(tower, suffixes=tower.suffixes[part], ends=tower.ends[part], cache={})


def half_table(rows: EmbeddedTable) -> tuple[SampleList, Ints]:
    """The rows of a half as they are dealt, and their places in the whole table."""
    indices = np.flatnonzero(rows.labels >= 0)
    names = ("labels", "domains", "clients", "splits")
    columns = {key: getattr(rows, key)[indices] for key in names}
    groups = None if rows.groups is None else rows.groups[indices]
    content = [rows.content[row] for row in indices.tolist()]
    return SampleList(rows.classes, **columns, content=content, groups=groups), indices


def to_full_indices(division: Partition, indices: Ints) -> Partition:
    """A half's division by the numbers that its rows have in the whole table."""
    parts = ("train", "validation", "test", "calibration")
    members = {
        id: replace(member, **{part: indices[getattr(member, part)] for part in parts})
        for id, member in division.clients.items()
    }
    return Partition(members, division.dropped, indices[division.public])


def new_half_clients(clients: Clients) -> Clients:
    """How the new half is dealt: nobody trains on it, so no shots and no public share of it."""
    return replace(clients, shots=0, min_samples=1, calibration_ratio=None, public_ratio=0.0)


def new_test_members(base: EmbeddedTable, new: Partition, ids: Collection[str]) -> dict[str, ClientSplit]:
    """The new half's test rows of each client; no image of the base half is among them."""
    content = rank_digests(base.content)
    base_content = np.unique(content[base.labels >= 0])
    none = np.zeros(0, np.int64)
    members = {}
    for id, member in new.clients.items():
        if id in ids:
            test = member.test[~np.isin(content[member.test], base_content)]
            members[id] = ClientSplit(id, member.domain, none, none, test)
    return members


def check_new_classes(method: Method, frozen: Frozen) -> None:
    """Refuses a method that cannot name a class it was not trained on."""
    made = [method.init(_with_classes(frozen, classes)) for classes in (2, 3)]
    shapes = [{key: tensor.shape for part in tensor_pair for key, tensor in part.items()} for tensor_pair in made]
    held = sorted(key for key in shapes[0] if shapes[0][key] != shapes[1].get(key))
    reason = f"its {held[0]!r} has a place for each class" if held else ""
    if method.traits.classes.fixed:
        reason = "it keeps labels of its rows"
    if reason:
        raise SettingsError(
            f"protocol = 'base-to-new' tests on classes nobody trained on, and {method.name} knows "
            f"only those it was trained on ({reason}); take a method whose classes come from text "
            "alone, as zero-shot, promptfl, fedotp or fedclip"
        )


def _with_classes(frozen: Frozen, classes: int) -> Frozen:
    part = slice(classes)
    return replace(
        frozen,
        classes=frozen.classes[part],
        text=None if frozen.text is None else frozen.text[part],
        text_tower=_tower(frozen.text_tower, part),
        descriptions=None if frozen.descriptions is None else frozen.descriptions[part],
    )


def score_new_classes(world: World, record: Record, training: str) -> dict[str, dict[str, int]]:
    """Rows and hits of each client's new classes, by what a training ended with."""
    shared, local = record.outcome(training, world.seed)
    initial_local = world.method.init(world.frozen)[1]
    out = {}
    for id in world.members:
        scores = measure(world, world.method.send(shared, id), local.get(id, initial_local), id)
        out[NEW_PREFIX + id] = {key: scores[key] for key in ("test_rows", "test_hits")}
    return out


def check_warm_start(first: Method, method: Method, frozen: Frozen) -> None:
    """Refuses a method that gives no head, and one that takes none."""
    if not isinstance(first, HeadProvider):
        raise SettingsError(f"warm_start = {first.name!r} gives no head to start from; use 'tofa'")
    first.init(frozen)
    head = method.init(frozen)[0].get("head")
    if head is None or tuple(head.shape) != (len(frozen.classes), frozen.dim):
        raise SettingsError(
            f"{method.name} shares no head over the classes, so it cannot start from "
            f"{first.name}'s; leave warm_start out, or take a method such as fedot or fedavg"
        )
