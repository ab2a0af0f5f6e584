"""Prepare a run: assign samples to clients and splits, and build what each training works on.

This is the only place that partitions samples: a run, its audit, `fedvlm partition`, a deployed site and a late
joiner all start from here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from fedvlm.data.partition import ClientSplit, Partition, SampleList, make_partition, select_samples
from fedvlm.data.table import UNLABELLED, Dataset, EmbeddedTable, pattern_names, rank_digests
from fedvlm.engines.attacks import flip_labels
from fedvlm.engines.client import TrainingTerms, World, client_world, measure
from fedvlm.engines.placement import with_device
from fedvlm.engines.state import POOLED_CLIENT
from fedvlm.errors import DataError, SettingsError, unknown_name
from fedvlm.evaluate.protocols import Training, contract
from fedvlm.evaluate.protocols.base_to_new import NEW, BaseToNew
from fedvlm.evaluate.protocols.own_test import EVERYONE
from fedvlm.evaluate.protocols.source_target import EVERY_DOMAIN
from fedvlm.machine import release_memory
from fedvlm.parts.findings import per_finding
from fedvlm.record import Record
from fedvlm.runner.load import check_needs
from fedvlm.runner.settings import Settings, attack_of
from fedvlm.storage.large_tensors import iterate_chunks

Ints = NDArray[np.int64]
Samples = EmbeddedTable | SampleList
CALIBRATION_RATIO = 1 / 3  # of the validation samples of own data: set aside for conformal prediction
MIN_BASE_TO_NEW_CLASSES = 4  # two in each half


@dataclass(frozen=True)
class Prepared:
    """Hold one seed of a run before anything is trained."""

    settings: Settings
    rows: EmbeddedTable
    seed: int
    partition: Partition
    frozen: Frozen
    others: "Mapping[str, OtherClasses]" = field(default_factory=dict)  # classes nobody trains on, tested at the end
    all_class_samples: EmbeddedTable | None = None  # base-to-new: the samples of all classes

    @property
    def source_samples(self) -> EmbeddedTable:
        """Return the samples this was prepared from."""
        return self.rows if self.all_class_samples is None else self.all_class_samples

    @cached_property
    def trainings(self) -> Sequence[Training]:
        return trainings_of(self.settings, self.partition.domains, self.seed)

    @cached_property
    def generalises(self) -> bool:
        """Return False for a method that trains but shares nothing: an unseen client gains nothing from it."""
        shared, _ = method_for(self.settings.method, self.frozen).init(self.frozen)
        return bool(shared) or self.settings.method.rounds == 0

    def check(self) -> None:
        """Refuse clients and reference samples that the method cannot work with."""
        for training in self.trainings:
            contract.check_training_data(self.settings.method, self.rows, self.partition, training)

    def reference(self, training: Training) -> Ints:
        """Return the unlabelled samples that the method adapts to, if it does."""
        return contract.reference_samples(self.settings.method, self.partition, training)

    def world(self, training: Training) -> World:
        """Return what one training works on."""
        members = self._members(training)
        texts = texts_by_client(self.rows.texts, self.partition.clients)
        world = self._world(members, texts, self.reference(training))
        return flip_labels(world, training.train)

    def _members(self, training: Training) -> Mapping[str, ClientSplit]:
        everyone = self.partition.clients
        plain = not (training.unseen or self.centralised)
        if plain and len(training.train) == len(everyone):
            return everyone  # a mapping that is small even for many clients
        train = set(training.train)
        members = {id: member for id, member in everyone.items() if id in train}
        members |= {id: self._unseen(id) for id in training.unseen}
        if self.centralised:
            members[POOLED_CLIENT] = pool_members([members[id] for id in training.train])
        return members

    def other_worlds(self) -> dict[str, World]:
        """Return what the test samples of classes nobody trains on are measured on, after all training."""
        return {
            name: replace(self, rows=other.rows, frozen=other.frozen)._world(other.members, {}, np.zeros(0, np.int64))
            for name, other in self.others.items()
        }

    def _unseen(self, id: str) -> ClientSplit:
        members = self.partition.clients
        return merge_test_samples(list(members.values())) if id == EVERYONE else members[id]

    @property
    def centralised(self) -> bool:
        """Return whether one client holds the samples of all that train, instead of a federation."""
        return self.settings.centralised or self.settings.method.traits.privacy.centralised

    def measured_training(self, training: Training) -> Training:
        """Return who trains and who is only measured; with pooled samples, all clients are only measured."""
        if not self.centralised:
            return training
        return replace(training, train=(POOLED_CLIENT,), unseen=(*training.train, *training.unseen))

    def warm_world(self, training: Training) -> World:
        """Return the world as the one-shot method of a warm start sees it."""
        first = self.settings.warm_start
        assert first is not None
        view = self.rows.view(first.traits.needs)
        return replace(self.world(training), method=with_device(first, self.settings.device), x=view)

    def own_world(self, id: str, name: str = "", entropy: bool = False) -> World:
        """Return the world of one client, without samples of others; there it is called `name`."""
        name = name or id
        texts = texts_by_client(self.rows.texts, self.partition.clients)
        own_texts = {name: texts[id]} if texts else {}
        world = self._world({name: self.partition.clients[id]}, own_texts, np.zeros(0, np.int64))
        return replace(client_world(world, name), secret_noise=entropy, details=False)

    def _world(self, members: Mapping[str, ClientSplit], texts: Mapping[str, Tensor], reference: Ints) -> World:
        terms = terms_of(self.settings, self.frozen, self.seed)
        return World(
            **{**vars(terms), "method": with_device(terms.method, self.settings.device)},
            x=self.rows.view(self.settings.method.traits.needs),
            y=label_tensor(self.rows),
            groups=group_numbers(self.rows),
            members=with_test_samples(members) if self.settings.transductive else members,
            reference=reference,
            texts=texts,
            details=True,
            subgroups={key: self.rows.subgroups[key] for key in self.settings.subgroups},
        )


@dataclass(frozen=True)
class OtherClasses:
    """Hold classes nobody trains on, and the test samples of them that each client's classifier is measured on."""

    rows: EmbeddedTable
    frozen: Frozen
    members: Mapping[str, ClientSplit]


def prepare(settings: Settings, rows: EmbeddedTable, seed: int) -> Prepared:
    partition, new_clients = divide_samples(settings, rows, seed)
    if settings.protocol != BaseToNew.name:
        others = {name: _test_data(rows, partition, table, seed) for name, table in rows.test_data.items()}
        return Prepared(settings, rows, seed, partition, frozen_of(rows, seed), others)
    base, new_half = split_classes(rows)
    new = OtherClasses(new_half, frozen_of(new_half, seed), new_clients)
    return Prepared(settings, base, seed, partition, frozen_of(base, seed), {NEW: new}, rows)


def _test_data(source: EmbeddedTable, partition: Partition, table: EmbeddedTable, seed: int) -> OtherClasses:
    """Return another data set, with its test samples (all, if it marks none) for every client that trains."""
    is_test = table.splits == "test"
    is_test = (is_test if is_test.any() else np.ones_like(is_test)) & (table.labels != UNLABELLED)
    clients = partition.clients.values()
    used = {source.content[i] for member in clients for i in (*member.train, *member.validation, *member.calibration)}
    test = np.array([i for i in np.flatnonzero(is_test).tolist() if table.content[i] not in used], np.int64)
    none = np.zeros(0, np.int64)
    members = {id: ClientSplit(id, "", none, none, test) for id in partition.clients}
    return OtherClasses(table, frozen_of(table, seed), members)


def divide_samples(settings: Settings, table: Samples, seed: int) -> tuple[Partition, dict[str, ClientSplit]]:
    """Assign samples to clients and splits; also return the test samples of new classes (base-to-new only).

    With base-to-new each half of the classes is divided by itself. Only test samples of the new half are used.
    """
    clients, undivided = settings.clients, () if settings.target == (EVERY_DOMAIN,) else settings.target
    in_memory = isinstance(table, EmbeddedTable) and table.encoder == IN_MEMORY
    if in_memory or own_data(settings):
        clients = with_calibration(clients)
    if settings.protocol != BaseToNew.name:
        partition = make_partition(table, clients, seed, undivided)
        release_memory()  # that the partition of many samples took
        return partition, {}
    n_base = _count_base_classes(table.classes)
    partition = _divide_classes(table, slice(0, n_base), clients, seed, undivided)
    # Nobody trains on the new half, so it needs no shots and no public samples.
    plain = replace(clients, shots=0, min_samples=1, calibration_ratio=None, public_ratio=0.0)
    new = _divide_classes(table, slice(n_base, len(table.classes)), plain, seed, ())
    content = rank_digests(table.content)
    base_content = np.unique(content[table.labels < n_base])
    none = np.zeros(0, np.int64)
    both = {id: client for id, client in new.clients.items() if id in partition.clients}
    tests = {id: client.test[~np.isin(content[client.test], base_content)] for id, client in both.items()}
    return partition, {id: ClientSplit(id, client.domain, none, none, tests[id]) for id, client in both.items()}


def _divide_classes(table: Samples, part: slice, clients: Clients, seed: int, undivided: Sequence[str]) -> Partition:
    """Divide the samples of some classes; the partition has their indices in the whole table."""
    indices = np.flatnonzero((table.labels >= part.start) & (table.labels < part.stop))
    partition = make_partition(select_samples(table, indices, part), clients, seed, undivided)
    splits = ("train", "validation", "test", "calibration")
    moved = {id: {s: indices[getattr(client, s)] for s in splits} for id, client in partition.clients.items()}
    full = {id: replace(client, **moved[id]) for id, client in partition.clients.items()}
    return Partition(full, partition.dropped, indices[partition.public])


def own_data(settings: Settings) -> bool:
    """Return whether a run is on a user's own images, and not on data of the catalogue or embeddings in a file."""
    return not settings.encoder.startswith("store:") and settings.data not in catalogue()


def with_calibration(clients: Clients) -> Clients:
    """Set a third of the validation samples aside for calibration, unless a ratio is given."""
    return clients if clients.calibration_ratio is not None else replace(clients, calibration_ratio=CALIBRATION_RATIO)


def with_test_samples(members: Mapping[str, ClientSplit]) -> dict[str, ClientSplit]:
    """Return the clients with their test samples also as samples without a label."""
    more = {id: np.sort(np.concatenate([member.unlabelled, member.test])) for id, member in members.items()}
    return {id: replace(member, unlabelled=more[id]) for id, member in members.items()}


def pool_members(members: Sequence[ClientSplit]) -> ClientSplit:
    """Return one client with the training and validation samples of all, and no test samples."""
    parts = {part: [getattr(member, part) for member in members] for part in ("train", "validation")}
    train, validation = (np.sort(np.concatenate(rows)) for rows in parts.values())
    return ClientSplit(POOLED_CLIENT, "", train, validation, np.zeros(0, np.int64))


def merge_test_samples(members: Sequence[ClientSplit]) -> ClientSplit:
    """Return a client with the test samples of all, and nothing else."""
    none = np.zeros(0, np.int64)
    return ClientSplit(EVERYONE, "", none, none, np.sort(np.concatenate([m.test for m in members])))


def prepare_client(
    settings: Settings, rows: EmbeddedTable, id: str, seed: int, frozen: Frozen | None = None
) -> Prepared:
    """Prepare a single client, whose samples need not be of every class."""
    partition = divide_client(settings.clients, rows, id, seed)
    return Prepared(settings, rows, seed, partition, frozen or frozen_of(rows, seed))


def divide_client(clients: Clients, rows: EmbeddedTable | SampleList, id: str, seed: int) -> Partition:
    """Assign the samples of a single client to splits."""
    present = np.unique(rows.labels[rows.labels >= 0])
    labels = np.where(rows.labels < 0, UNLABELLED, np.searchsorted(present, rows.labels))
    names = rows.classes if rows.findings is None else pattern_names(rows.findings, rows.classes)
    classes = tuple(names[i] for i in present)
    client_column = np.full(len(labels), id)
    table = SampleList(classes, labels, rows.domains, client_column, rows.splits, rows.content, rows.groups)
    return make_partition(table, replace(clients, partition="own"), seed)


def trainings_of(settings: Settings, domains: Mapping[str, str], seed: int) -> list[Training]:
    """Return the trainings of one seed; a server needs no more than the clients' domains."""
    return settings.rules().trainings(domains, seed)


def terms_of(settings: Settings, frozen: Frozen, seed: int) -> TrainingTerms:
    metrics = settings.rules().every_round
    attack = attack_of(settings)
    method = method_for(settings.method, frozen)
    rule = settings.group_metrics
    return TrainingTerms(method, frozen, seed, settings.channel, metrics=metrics, attack=attack, group_metrics=rule)


def method_for(method: Method, frozen: Frozen) -> Method:
    """Return the method as it trains on these classes: one binary problem each if an image may have several."""
    return per_finding(method) if frozen.multi_label else method


def label_tensor(rows: Dataset | EmbeddedTable) -> Tensor:
    """Return labels (samples,), or (samples, findings) of 1, 0 and -1 (unknown)."""
    if rows.findings is None:
        return torch.from_numpy(rows.labels)
    return torch.from_numpy(rows.findings[rows.labels].astype(np.int64))


def label_keys(label: int | list[int], classes: Sequence[str]) -> list[str]:
    """Name what a label says: its class, or each known finding; the server chooses the order of the classes."""
    if isinstance(label, int):
        return [classes[label]]
    return [f"{name} {value}" for name, value in zip(classes, label, strict=True) if value >= 0] or ["unknown"]


def group_numbers(rows: EmbeddedTable) -> Tensor | None:
    """Return (samples,) the number of each sample's group; a sample without a group is one of its own."""
    if rows.groups is None:
        return None
    alone = np.char.add("\x1f", np.arange(len(rows.groups)).astype(np.str_))  # no group name begins with this character
    numbers = np.unique(np.where(rows.groups == "", alone, rows.groups), return_inverse=True)[1]
    return torch.from_numpy(numbers.reshape(-1))


def frozen_of(rows: EmbeddedTable, seed: int) -> Frozen:
    rest = (rows.text_tower, rows.image_tower, rows.descriptions, rows.negative_text, rows.findings is not None)
    return Frozen(rows.classes, rows.x.shape[1], rows.scale, rows.text, seed, *rest)


def frozen_from(about: Mapping[str, Any], text: Tensor | None, seed: int, descriptions: Tensor | None = None) -> Frozen:
    """Build the frozen tensors from a manifest, a saved classifier or a site's reply; without towers."""
    multi_label = bool(about.get("multi_label"))
    text, negative = split_text(text, multi_label)
    size = tuple(about["classes"]), int(about["dim"]), float(about["scale"])
    return Frozen(*size, text, seed, None, None, descriptions, negative, multi_label)


def text_of(rows: Frozen | EmbeddedTable) -> Tensor | None:
    """Return the text embeddings as manifests and classifiers hold them; (findings, 2, dim) with several findings."""
    if rows.text is None or rows.negative_text is None:
        return rows.text
    return torch.stack([rows.negative_text, rows.text], dim=1)


def split_text(text: Tensor | None, multi_label: bool) -> tuple[Tensor | None, Tensor | None]:
    """Invert `text_of`: return the text embeddings of images with and without each finding."""
    return (text[:, 1], text[:, 0]) if multi_label and text is not None else (text, None)


def template_of(rows: Frozen | EmbeddedTable) -> dict[str, str]:
    """Return the prompt template, as manifests, saved classifiers and sites' replies hold it."""
    return {} if rows.text_tower is None else {"template": rows.text_tower.template}


def check_samples(settings: Settings, rows: EmbeddedTable) -> None:
    """Refuse samples that no method can use, before any work."""
    # A sum is finite only if all its numbers are, and needs no second copy of the embeddings.
    sums = torch.cat([part.sum(dim=1) for _, part in iterate_chunks(rows.x)])
    bad = (~sums.isfinite()).nonzero().flatten().tolist()
    if bad:
        where = f"{len(bad)} embeddings hold NaN or infinite numbers, the first in row {bad[0]}"
        raise DataError(f"{where}; encode these samples again, or leave them out")
    if settings.group_metrics != "image":
        _check_group_classes(settings, rows)
    if rows.findings is not None:
        _check_findings(settings)
    elif len(rows.classes) < 2:
        raise DataError(f"there is only one class, {rows.classes[0]!r}; a classifier needs at least two")
    n_labels = len(rows.classes if rows.findings is None else rows.findings)
    outside = [i for i in np.unique(rows.labels).tolist() if not UNLABELLED <= i < n_labels]
    if outside:
        limit = f"from 0 to {n_labels - 1}, as there are {n_labels} classes"
        raise DataError(f"label {outside[0]} must be {limit}; correct the labels, or name every class")
    for name in settings.subgroups:
        if name not in rows.subgroups:
            raise unknown_name("column for subgroups", name, rows.subgroups)
    check_needs(settings.method, rows.encoder, rows.offers())
    frozen = frozen_of(rows, settings.seeds[0])
    method_for(settings.method, frozen).init(frozen)  # a method may refuse the dimension
    if settings.protocol in contract.NEW_CLASS_PROTOCOLS:
        if settings.protocol == BaseToNew.name:
            _count_base_classes(rows.classes)
        check_new_classes(settings.method, frozen, settings.protocol)
        _check_test_data(settings, rows)
    if settings.warm_start is not None:
        check_needs(settings.warm_start, rows.encoder, rows.offers())
        check_warm_start(settings.warm_start, settings.method, frozen)


def _check_group_classes(settings: Settings, rows: EmbeddedTable) -> None:
    """Refuse metrics by group without groups, or where a group has images of several classes."""
    rule, groups = settings.group_metrics, group_numbers(rows)
    if groups is None:
        problem = f'group_metrics = "{rule}" needs groups, and the data have none'
        remedy = 'add a column group (a patient, a slide), or set group_metrics = "image"'
        raise SettingsError(f"{problem}; {remedy}")
    if rows.findings is None:
        pairs = np.unique(np.stack([groups.numpy(), rows.labels]), axis=1)[0]
        if len(several := pairs[1:][pairs[1:] == pairs[:-1]]):
            first = int(np.flatnonzero(groups.numpy() == several[0])[0])
            problem = f"needs one class per group, and the group of row {first} has images of several classes"
            remedy = 'correct its labels, or set group_metrics = "image"'
            raise DataError(f'group_metrics = "{rule}" {problem}; {remedy}')


def _check_findings(settings: Settings) -> None:
    """Refuse what is only defined for one class per image."""
    clients, attack = settings.clients, attack_of(settings)
    single = {
        f"protocol = {settings.protocol!r}": settings.protocol in contract.NEW_CLASS_PROTOCOLS,
        "warm_start": settings.warm_start is not None,
        f"clients.shots = {clients.shots}": bool(clients.shots),
        f"clients.partition = {clients.partition!r}": clients.partition not in ("iid", "own", "domain", "dirichlet"),
        "the attack label-flip": attack is not None and attack.kind == "label-flip",
    }
    for name, is_used in single.items():
        if is_used:
            raise SettingsError(f"{name} needs one class per image, and these data have several findings per image")


def _count_base_classes(classes: Sequence[str]) -> int:
    """Return the size of the base half: the first classes, one more than the new half if their number is odd."""
    if len(classes) < MIN_BASE_TO_NEW_CLASSES:
        needs = f"at least {MIN_BASE_TO_NEW_CLASSES} classes, got {len(classes)}"
        raise DataError(f"base-to-new needs {needs}; use protocol = 'own-test', or data with more classes")
    return -(-len(classes) // 2)


def split_classes(rows: EmbeddedTable) -> tuple[EmbeddedTable, EmbeddedTable]:
    """Return the samples twice: with the labels of the base and of the new half, and -1 for the other half."""
    middle = _count_base_classes(rows.classes)
    return _half(rows, 0, middle), _half(rows, middle, len(rows.classes))


def _half(rows: EmbeddedTable, first: int, last: int) -> EmbeddedTable:
    part = slice(first, last)
    labels = np.where((rows.labels >= first) & (rows.labels < last), rows.labels - first, -1)
    texts = {id: client_texts[part] for id, client_texts in rows.texts.items()}
    return replace(rows, labels=labels, texts=texts, **_class_fields(rows, part))


def _class_fields(table: EmbeddedTable | Frozen, part: slice) -> dict[str, Any]:
    """Return what depends on the classes, for some of them."""
    tower: Any = table.text_tower
    if tower is not None:
        tower = replace(tower, suffixes=tower.suffixes[part], ends=tower.ends[part], cache={})
    parts = {name: getattr(table, name) for name in ("classes", "text", "descriptions")}
    return {name: None if whole is None else whole[part] for name, whole in parts.items()} | {"text_tower": tower}


def check_new_classes(method: Method, frozen: Frozen, protocol: str = BaseToNew.name) -> None:
    """Refuse a method that cannot predict a class it was not trained on."""
    initial = [method.init(replace(frozen, **_class_fields(frozen, slice(n_classes)))) for n_classes in (2, 3)]
    shapes = [{key: tensor.shape for part in parts for key, tensor in part.items()} for parts in initial]
    per_class = sorted(key for key in shapes[0] if shapes[0][key] != shapes[1].get(key))
    reason = f"its {per_class[0]!r} has a row per class" if per_class else ""
    if method.traits.classes.fixed:
        reason = "it stores labels of its samples"
    if reason:
        raise SettingsError(
            f"protocol = {protocol!r} tests on classes that nobody trained on, which {method.name} cannot predict "
            f"({reason}); use a method whose classes come from text alone, as zero-shot, promptfl, fedotp or fedclip"
        )


def _check_test_data(settings: Settings, rows: EmbeddedTable) -> None:
    """Refuse data sets to test on that are missing, or that the source's encoder cannot have embedded."""
    names = settings.protocol_settings.get("test_data", ())
    if missing := [name for name in names if name not in rows.test_data]:
        problem = f"test_data = {missing[0]!r} is not among the samples in memory"
        raise SettingsError(f"{problem}; add it with fedvlm.data.table.with_test_data")
    for name, table in rows.test_data.items():
        ours, theirs = ((entry.x.shape[1], entry.scale, entry.text is not None) for entry in (rows, table))
        if table.findings is not None or ours != theirs:
            problem = f"test_data {name} has dimension, logit scale and text {theirs}, and the training data {ours}"
            raise DataError(f"{problem}; embed both with one encoder, with one class per image")
        check_needs(settings.method, table.encoder, table.offers())


def score_new_classes(name: str, world: World, record: Record, training: str) -> dict[str, dict[str, int]]:
    """Count each client's test samples of classes nobody trained on, and those predicted correctly."""
    shared, local = record.outcome(training, world.seed)
    initial_local = world.method.init(world.frozen)[1]
    out = {}
    for id in world.members:
        scores = measure(world, world.method.send(shared, id), local.get(id, initial_local), id)
        out[f"{name} {id}"] = {key: scores[key] for key in ("test_rows", "test_hits")}
    return out


def check_warm_start(first: Method, method: Method, frozen: Frozen) -> None:
    """Refuse a warm start by a method without a head, or of a method without one."""
    if not isinstance(first, HeadProvider):
        raise SettingsError(f"warm_start = {first.name!r} has no head to start from; use 'tofa'")
    first.init(frozen)
    head = method.init(frozen)[0].get("head")
    if head is None or tuple(head.shape) != (len(frozen.classes), frozen.dim):
        problem = f"{method.name} shares no head over the classes, so warm_start = {first.name!r} does not apply"
        raise SettingsError(f"{problem}; leave it out, or use a method such as fedot or fedavg")
