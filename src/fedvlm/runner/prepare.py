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
from fedvlm.data.arrays import MEMORY
from fedvlm.data.catalogue import catalogue
from fedvlm.data.clients import Clients
from fedvlm.data.descriptions import dealt
from fedvlm.data.federation import Division, Listing, divide
from fedvlm.data.members import Member
from fedvlm.data.table import Embedded
from fedvlm.engines.attack import mislabelled
from fedvlm.engines.client import Terms, World, own_world
from fedvlm.engines.placed import on
from fedvlm.engines.state import POOLED
from fedvlm.errors import DataError
from fedvlm.evaluate import reference
from fedvlm.evaluate.protocols import Training
from fedvlm.evaluate.protocols.base_to_new import BaseToNew
from fedvlm.evaluate.protocols.own_test import EVERYONE
from fedvlm.evaluate.protocols.source_target import EACH
from fedvlm.machine import give_back
from fedvlm.runner import halves, warm
from fedvlm.runner.load import meet
from fedvlm.runner.settings import Settings, attack_of
from fedvlm.storage.paged import stretches

Ints = NDArray[np.int64]
THIRD = 1 / 3  # of the validation rows of own data: set aside, to promise coverage by


@dataclass(frozen=True)
class Prepared:
    """One seed of a run before anything is trained."""

    settings: Settings
    rows: Embedded
    seed: int
    division: Division
    frozen: Frozen
    new: "New | None" = None  # base-to-new: the classes nobody trains on
    every: Embedded | None = None  # base-to-new: the rows of all classes, as they were given

    @property
    def given(self) -> Embedded:
        """The rows it was prepared from."""
        return self.rows if self.every is None else self.every

    @cached_property
    def trainings(self) -> Sequence[Training]:
        return trainings_of(self.settings, self.division.domains, self.seed)

    @cached_property
    def generalises(self) -> bool:
        """An unseen client of a method that trains but shares nothing has learnt nothing."""
        shared, _ = self.settings.method.init(self.frozen)
        return bool(shared) or self.settings.method.rounds == 0

    def check(self) -> None:
        """Refuses clients and reference rows that the method cannot work with."""
        for one in self.trainings:
            reference.check(self.settings.method, self.rows, self.division, one)

    def reference(self, training: Training) -> Ints:
        """The unlabelled rows that the method adapts to in a training, if it does."""
        return reference.reference(self.settings.method, self.division, training)

    def world(self, training: Training) -> World:
        """All that one training works on."""
        members = self._members(training)
        texts = dealt(self.rows.texts, self.division.members)
        world = self._world(members, texts, self.reference(training))
        return mislabelled(world, training.train)

    def _members(self, training: Training) -> Mapping[str, Member]:
        everyone = self.division.members
        plain = not (training.unseen or self.centralised)
        if plain and len(training.train) == len(everyone):
            return everyone  # which many clients take no memory in
        train = set(training.train)
        members = {id: one for id, one in everyone.items() if id in train}
        members |= {id: self._unseen(id) for id in training.unseen}
        if self.centralised:
            members[POOLED] = pooled([members[id] for id in training.train])
        return members

    def new_world(self) -> World:
        """What the test rows of new classes are measured on, when all training is over."""
        assert self.new is not None
        other = replace(self, rows=self.new.rows, frozen=self.new.frozen)
        return other._world(self.new.members, {}, np.zeros(0, np.int64))

    def _unseen(self, id: str) -> Member:
        members = self.division.members
        return everyone(list(members.values())) if id == EVERYONE else members[id]

    @property
    def centralised(self) -> bool:
        """Whether the run is no federation: one client with the rows of all that train."""
        return self.settings.centralised or self.settings.method.traits.centralised

    def taught(self, training: Training) -> Training:
        """Who trains and who is only measured: if rows are pooled, all clients are."""
        if not self.centralised:
            return training
        return replace(training, train=(POOLED,), unseen=(*training.train, *training.unseen))

    def warm_world(self, training: Training) -> World:
        """The same as the one-shot method that gives the first head sees it."""
        first = self.settings.warm_start
        assert first is not None
        return replace(
            self.world(training),
            method=on(first, self.settings.device),
            x=self.rows.view(first.traits.needs),
        )

    def own_world(self, id: str, name: str = "", entropy: bool = False) -> World:
        """What one client works on, without a row of another; `name` is what it is called there."""
        name = name or id
        texts = dealt(self.rows.texts, self.division.members)
        world = self._world(
            {name: self.division.members[id]},
            {name: texts[id]} if texts else {},
            np.zeros(0, np.int64),
        )
        return replace(own_world(world, name), entropy=entropy, details=False)

    def _world(
        self, members: Mapping[str, Member], texts: Mapping[str, Tensor], reference: Ints
    ) -> World:
        terms = terms_of(self.settings, self.frozen, self.seed)
        return World(
            **{**vars(terms), "method": on(terms.method, self.settings.device)},
            x=self.rows.view(self.settings.method.traits.needs),
            y=torch.from_numpy(self.rows.labels),
            members=members,
            reference=reference,
            texts=texts,
            details=True,
        )


@dataclass(frozen=True)
class New:
    """The other half of the classes, and each client's test rows of them."""

    rows: Embedded
    frozen: Frozen
    members: Mapping[str, Member]


def prepare(settings: Settings, rows: Embedded, seed: int) -> Prepared:
    clients = settings.clients
    if rows.encoder == MEMORY or own_data(settings):
        clients = set_aside(clients)
    if settings.protocol == BaseToNew.name:
        base, other = halves.halves(rows)
        division = _half(base, clients, seed, whole(settings))
        dealt_new = _half(other, halves.plain(clients), seed, ())
        members = halves.tested(base, dealt_new, division.members)
        new = New(other, frozen_of(other, seed), members)
        return Prepared(settings, base, seed, division, frozen_of(base, seed), new, rows)
    division = divide(rows, clients, seed, whole(settings))
    give_back()  # of many rows, what dealing them took
    return Prepared(settings, rows, seed, division, frozen_of(rows, seed))


def _half(rows: Embedded, clients: Clients, seed: int, together: Sequence[str]) -> Division:
    table, mine = halves.listing(rows)
    return halves.placed(divide(table, clients, seed, together), mine)


def own_data(settings: Settings) -> bool:
    """Whether a run is on a user's own images; experiments on known data keep their splits."""
    return not settings.encoder.startswith("store:") and settings.data not in catalogue()


def set_aside(clients: Clients) -> Clients:
    """A third of the validation rows, unless a share is named."""
    return (
        clients
        if clients.calibration_ratio is not None
        else replace(clients, calibration_ratio=THIRD)
    )


def pooled(members: Sequence[Member]) -> Member:
    """All their training and validation rows as those of one client; nobody tests it."""
    train, validation = (
        np.sort(np.concatenate([getattr(one, part) for one in members]))
        for part in ("train", "validation")
    )
    return Member(POOLED, "", train, validation, np.zeros(0, np.int64))


def everyone(members: Sequence[Member]) -> Member:
    """A client of all their test rows, and no others."""
    none = np.zeros(0, np.int64)
    return Member(EVERYONE, "", none, none, np.sort(np.concatenate([m.test for m in members])))


def whole(settings: Settings) -> tuple[str, ...]:
    """What stays together however rows are dealt: the targets, if they are named."""
    return () if settings.target == (EACH,) else settings.target


def prepare_one(
    settings: Settings, rows: Embedded, id: str, seed: int, frozen: Frozen | None = None
) -> Prepared:
    """The same for a client with rows of its own, which need not be of every class."""
    present, labels = np.unique(rows.labels, return_inverse=True)
    classes = tuple(rows.classes[i] for i in present)
    mine = np.full(len(labels), id)
    table = Listing(classes, labels, rows.domains, mine, rows.splits, rows.content, rows.groups)
    division = divide(table, replace(settings.clients, partition="own"), seed)
    return Prepared(settings, rows, seed, division, frozen or frozen_of(rows, seed))


def trainings_of(settings: Settings, domains: Mapping[str, str], seed: int) -> list[Training]:
    """The trainings of one seed; of the clients nothing but their domains has to be known."""
    return settings.rules().trainings(domains, seed)


def terms_of(settings: Settings, frozen: Frozen, seed: int) -> Terms:
    every = settings.rules().every_round
    attack = attack_of(settings)
    return Terms(settings.method, frozen, seed, settings.channel, metrics=every, attack=attack)


def frozen_of(rows: Embedded, seed: int) -> Frozen:
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


def frozen_from(
    about: Mapping[str, Any], text: Tensor | None, seed: int, descriptions: Tensor | None = None
) -> Frozen:
    """What a manifest, a saved classifier or a site tells of classes and encoder; no towers."""
    classes = tuple(about["classes"])
    scale = float(about["scale"])
    return Frozen(classes, int(about["dim"]), scale, text, seed, descriptions=descriptions)


def template_of(rows: Frozen | Embedded) -> dict[str, str]:
    """What a manifest, a saved classifier and a site tell of the words around a prompt."""
    return {} if rows.text_tower is None else {"template": rows.text_tower.template}


def check_rows(settings: Settings, rows: Embedded) -> None:
    """Refuses rows no method can use, before any work."""
    # A sum is finite only if all its numbers are, and takes no second copy of the rows.
    sums = torch.cat([part.sum(dim=1) for _, part in stretches(rows.x)])
    bad = (~sums.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"{len(bad)} embeddings hold NaN or infinite numbers, the first in row {bad[0]}; "
            "encode them again, or leave those rows out"
        )
    if len(rows.classes) < 2:
        raise DataError(
            f"there is one class only, {rows.classes[0]!r}; a classifier takes two or more"
        )
    outside = [i for i in np.unique(rows.labels).tolist() if not 0 <= i < len(rows.classes)]
    if outside:
        raise DataError(
            f"label {outside[0]} is outside the {len(rows.classes)} classes (0 to "
            f"{len(rows.classes) - 1}); correct the labels, or name every class"
        )
    meet(settings.method, rows.encoder, rows.offers())
    ready = frozen_of(rows, settings.seeds[0])
    settings.method.init(ready)  # a method may refuse the dimension
    if settings.protocol == BaseToNew.name:
        halves.halves(rows)
        halves.check(settings.method, ready)
    if settings.warm_start is not None:
        meet(settings.warm_start, rows.encoder, rows.offers())
        warm.check(settings.warm_start, settings.method, ready)
