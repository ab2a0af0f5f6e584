"""What one client does in a round, in every engine: gather its samples, measure and update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm import seeds
from fedvlm.channel import Channel
from fedvlm.core import Client, Frozen, Method, Noisy, Schedule, Tensors, schedule
from fedvlm.data.partition import ClientSplit
from fedvlm.errors import SettingsError
from fedvlm.evaluate.findings import measure_findings
from fedvlm.evaluate.metrics import compute_metrics, diagram_data, prediction_details
from fedvlm.maths import privacy
from fedvlm.storage.large_tensors import PagedRows, page_rows
from fedvlm.tensors import to_float32

PREDICTION_BYTES = 64 << 20  # bytes of samples that are predicted at once
MANY_CLIENTS = 2000  # clients above which scores are only counts: their few samples give no curves


@dataclass(frozen=True)
class ClientRows:
    """Row numbers of one client's samples."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]
    calibration: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    unlabelled: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


Member = ClientRows | ClientSplit


def member_rows(member: Member) -> list[NDArray[np.int64]]:
    """Return the row numbers of a client's samples, as the fields of `ClientRows`."""
    return [member.train, member.validation, member.test, member.calibration, member.unlabelled]


GroupRule = Literal["image", "mean", "max"]
Kind = Literal["none", "sign-flip", "scale", "label-flip", "noise", "collude"]
DEFAULT_STRENGTH = {"sign-flip": 10.0, "scale": 10.0, "noise": 10.0, "collude": 1.5, "label-flip": 1.0}


@dataclass(frozen=True)
class Attack:
    kind: Kind
    fraction: float  # of the training clients
    strength: float = 0.0  # 0: the default of its kind

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise SettingsError(f"attacker_fraction = {self.fraction} is outside (0, 1); 0.1 is one of ten")
        if not 0 <= self.strength < float("inf"):
            raise SettingsError(f"attack_strength = {self.strength}; it takes 0 (the usual) or more")
        if self.kind == "label-flip" and self.strength > 1:
            raise SettingsError(f"attack_strength = {self.strength} of label-flip is a fraction; it is at most 1")

    @property
    def effective_strength(self) -> float:
        return self.strength or DEFAULT_STRENGTH[self.kind]


def choose_attackers(attack: Attack, ids: Sequence[str], seed: int) -> set[str]:
    """Draw the clients that attack by seed; at least one."""
    ordered = sorted(ids)
    count = max(1, round(attack.fraction * len(ordered)))
    drawn = torch.randperm(len(ordered), generator=seeds.generator("attackers", seed))
    return {ordered[i] for i in drawn[:count].tolist()}


@dataclass(frozen=True)
class TrainingTerms:
    """What everyone knows of a training, also a server that has no samples."""

    method: Method
    frozen: Frozen
    seed: int
    channel: Channel = field(default_factory=Channel)  # between client and server
    metrics: bool = False  # measure every metric in every round, not only at the end
    attack: Attack | None = None  # by some of the clients, in a simulation
    group_metrics: GroupRule = "image"  # measure every image, or each group by the mean or maximum of its logits


@dataclass(frozen=True, kw_only=True)
class World(TrainingTerms):
    """The terms, and what only clients have: their samples."""

    x: Any  # (samples, ...) in the view that the method needs: a Tensor, or LazyRows
    y: Tensor  # (samples,), or (samples, findings) with several findings per image
    members: Mapping[str, Member]
    reference: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    groups: Tensor | None = None  # (samples,) number of the patient, lesion or slide, if the data have groups
    subgroups: Mapping[str, NDArray[np.str_]] = field(default_factory=dict)  # (samples,) columns to report metrics by
    texts: Mapping[str, Tensor] = field(default_factory=dict)  # of clients that bring class descriptions of their own
    secret_noise: bool = False  # noise from the system's entropy instead of the seed, at a deployed site
    details: bool = False  # report the last scores sample by sample; never at a deployed site

    @cached_property
    def reference_x(self) -> Any:
        """Gather the reference samples (references, ...) once, because every client has the same."""
        return gather_rows(self, self.reference)[0]

    @cached_property
    def file_rows(self) -> PagedRows | None:
        return page_rows(self.x)

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        """Read samples (samples, ...) into memory, in the precision in which they are stored."""
        index, x = torch.from_numpy(rows), self.x
        if not isinstance(x, Tensor):
            return torch.as_tensor(x[index])
        return self.file_rows.take(rows) if self.file_rows else x.index_select(0, index.to(x.device))

    @cached_property
    def has_many_clients(self) -> bool:
        return len(self.members) > MANY_CLIENTS

    @cached_property
    def training_schedule(self) -> Schedule:
        return schedule(self.method)

    @cached_property
    def noise_size(self) -> int:
        """Count the standard normal numbers that each step gets."""
        return self.method.noise(self.frozen) if isinstance(self.method, Noisy) else 0


@dataclass(frozen=True)
class RemoteState:
    """The version of local tensors at their client: the round that made it plus one, 0 before any."""

    version: int = 0
    names: tuple[str, ...] = ()  # of the tensors, as far as the server knows them


Local = Tensors | RemoteState


def local_names(local: Local) -> list[str]:
    return list(local.names if isinstance(local, RemoteState) else local)


def as_tensors(local: Local) -> Tensors:
    """Return local tensors of a client in this process."""
    assert not isinstance(local, RemoteState), "these local tensors are at their client"
    return local


@dataclass(frozen=True)
class Task:
    """What one client does in a round: it trains, or is only measured."""

    id: str
    sent: Tensors
    local: Local
    trains: bool
    best_local: Local | None = None  # local tensors of the best round so far, if a round is selected

    @property
    def local_tensors(self) -> Tensors:
        return as_tensors(self.local)


GatherRows = Callable[[World, NDArray[np.int64]], tuple[Any, Tensor]]  # samples and labels by row number
Scores = dict[str, Any]  # loss, numbers of samples and correct ones, and metrics of the test samples


@dataclass(frozen=True)
class ClientReply:
    upload: Tensors | None  # None if the client was only measured
    local: Local
    scores: Scores  # of what the client was sent, before its update
    rows: int  # training samples: the weight of its upload
    description: Mapping[str, float] | None = None  # of its local tensors, by a client on another machine
    is_encoded: bool = False  # the client itself has encoded its upload for the channel
    releases: int = 0  # uploads of this training that have left it, by its own count; 0: unknown

    @property
    def local_tensors(self) -> Tensors:
        return as_tensors(self.local)


@dataclass(frozen=True)
class RoundReplies:
    """The replies of a round, and why the other clients did not reply."""

    replies: Mapping[str, ClientReply]
    missing: Mapping[str, str] = field(default_factory=dict)
    decoded_sum: Tensors | None = None  # of the uploads, if the server only gets their verified sum
    min_clients: int = 0  # replies that must remain if some are refused later
    line: Mapping[str, float | None] = field(default_factory=dict)  # scores of all clients together, for the record


class Engine(Protocol):
    """Run the tasks of clients; it may leave out clients that do not answer, as long as enough of them do."""

    def round(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        """Measure every client with what it was sent; then train those that take part."""

    def adapt(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        """Adapt the clients after the rounds and measure them with the result."""

    def close(self) -> None: ...


def minibatch_order(world: World, id: str, number: int) -> Tensor:
    """Draw the minibatches of a round (steps, batch); the last of an epoch may be short."""
    rows = len(world.members[id].train)
    epochs, steps_per_epoch, size = world.training_schedule.steps(rows)
    generator = seeds.generator("order", world.seed, id, number)
    order = torch.full((epochs, steps_per_epoch * size), -1)
    for epoch in range(epochs):
        order[epoch, :rows] = torch.randperm(rows, generator=generator)
    return order.reshape(epochs * steps_per_epoch, size)


def gather_rows(world: World, rows: NDArray[np.int64]) -> tuple[Any, Tensor]:
    index = torch.from_numpy(rows)
    x = world.read(rows) if isinstance(world.x, Tensor) else world.x.take(index)
    return x, world.y[index]


def client_world(world: World, id: str) -> World:
    """Return the world as one client has it: no sample of another client but the public reference."""
    member = world.members[id]
    parts = (*member_rows(member), world.reference)
    rows = np.concatenate(parts)
    places = np.split(np.arange(len(rows)), np.cumsum([len(part) for part in parts])[:-1])
    x, y = gather_rows(world, rows)
    return replace(
        world,
        x=x,
        y=y,
        groups=None if world.groups is None else world.groups[torch.from_numpy(rows)],
        subgroups={},  # they stay where the data are
        members={id: ClientRows(*places[:-1])},
        reference=places[-1],
        texts={id: world.texts[id]} if id in world.texts else {},
    )


def make_client(world: World, id: str, number: int, take: GatherRows = gather_rows) -> Client:
    member = world.members[id]
    order = minibatch_order(world, id, number)
    return Client(
        *take(world, member.train),
        order,
        *take(world, member.validation),
        world.reference_x,
        _reference_order(world, id, number, order),
        world.texts.get(id, torch.zeros(len(world.frozen.classes), 0, world.frozen.dim)),
        _noise(world, id, number, len(order)),
        *([take(world, member.unlabelled)[0]] if world.method.traits.training.unlabelled else []),
    )


def _noise(world: World, id: str, number: int, steps: int) -> Tensor:
    count = world.noise_size
    if not count:
        return torch.zeros(steps, 0)
    share: float = world.channel.honest**-0.5  # of the noise in a verified sum
    if world.secret_noise:
        return share * privacy.secure_normal(steps, count)
    return share * torch.randn(steps, count, generator=seeds.generator("noise", world.seed, id, number))


def channel_noise(world: World, id: str, number: int) -> privacy.Draw:
    """Return the noise of the channel: by seed in a simulation, from the system's entropy at a deployed site."""
    if world.secret_noise:
        return privacy.secure_normal
    return privacy.seeded_normal(seeds.generator("channel noise", world.seed, id, number))


def _reference_order(world: World, id: str, number: int, order: Tensor) -> Tensor:
    """Draw the reference samples of each minibatch: shuffled, and again from the start when used up."""
    rows = len(world.reference)
    if not rows:
        return order[:, :0]
    generator = seeds.generator("reference", world.seed, id, number)
    rounds = -(-order.numel() // rows)
    permutations = [torch.randperm(rows, generator=generator) for _ in range(rounds)]
    return torch.cat(permutations)[: order.numel()].reshape(order.shape)


def predict(world: World, sent: Tensors, local: Tensors, rows: NDArray[np.int64]) -> Tensor:
    """Return logits (samples, classes), computed in slices where samples are large."""
    width = int(np.prod(world.x.shape[1:]))
    size = max(1, PREDICTION_BYTES // (4 * width))
    parts = (to_float32(world.read(part)) for part in np.split(rows, range(size, len(rows), size)))
    return torch.cat([world.method.predict(world.frozen, sent, local, x) for x in parts])


def evaluation_rows(world: World, id: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows to evaluate a client on: validation (training if there are none), and test."""
    member = world.members[id]
    return (member.validation if len(member.validation) else member.train), member.test


def score_counts(loss: float, rows: Sequence[int], n_correct: Sequence[int]) -> Scores:
    """Return scores as they are recorded, of validation and test; without samples there is no loss."""
    validation = {"validation_rows": rows[0], "validation_hits": n_correct[0]}
    return ({"loss": loss} if rows[0] else {}) | validation | {"test_rows": rows[1], "test_hits": n_correct[1]}


def measure(world: World, sent: Tensors, local: Tensors, id: str, last: bool = False) -> Scores:
    """Measure the loss on the validation samples (or the training samples), and the correct ones there and in the test.

    At the `last` time also, but for a crowd, the metrics of the test rows, with what their diagrams
    are drawn from, the correct ones if only classes of the client's training samples may be named, and in a
    simulation the rows' hits and the confusion matrix.
    """
    val_rows, test = evaluation_rows(world, id)
    rows = np.concatenate([val_rows, test])
    logits, y, n_val = predict(world, sent, local, rows), world.y[torch.from_numpy(rows)], len(val_rows)
    groups = None if world.groups is None else world.groups[torch.from_numpy(rows)]
    (val_logits, val_y), (test_logits, test_y) = (
        (logits[part], y[part]) for part in (slice(n_val), slice(n_val, None))
    )
    test_groups = None if groups is None else groups[n_val:]
    if groups is not None and world.group_metrics != "image":
        val_logits, val_y = pool_groups(val_logits, val_y, groups[:n_val], world.group_metrics)
        test_logits, test_y = pool_groups(test_logits, test_y, groups[n_val:], world.group_metrics)
        test_groups = None
    is_final = last and not world.has_many_clients
    samples: Scores = {}
    if is_final and world.details and world.subgroups:
        places = np.arange(len(test)) if len(test_y) == len(test) else first_of_group(groups, n_val)
        samples["samples"] = {
            "p": (test_logits.sigmoid() if world.frozen.multi_label else test_logits.softmax(1)).tolist(),
            "y": test_y.tolist(),
            "groups": list(range(len(test_y))) if test_groups is None else _number_groups(test_groups),
            "subgroups": {key: column[test][places].tolist() for key, column in world.subgroups.items()},
        }
    if world.frozen.multi_label:
        with_metrics = world.metrics or is_final
        scores = measure_findings((val_logits, test_logits), (val_y, test_y), with_metrics, last and world.details)
        scores |= samples
        if is_final and world.details:  # correct predictions are listed by known label, and belong to an image or group
            units = torch.arange(len(test_y)) if test_groups is None else test_groups
            scores["groups"] = _number_groups(units[:, None].expand(test_y.shape)[test_y >= 0])
        return scores
    loss = torch.nn.functional.cross_entropy(val_logits, val_y)
    n_correct = [
        int((part.argmax(dim=1) == truth).sum()) for part, truth in ((val_logits, val_y), (test_logits, test_y))
    ]
    scores = score_counts(loss.item(), [len(val_y), len(test_y)], n_correct) | samples
    if len(test_y) and (is_final or world.metrics):
        p = test_logits.softmax(dim=1)
        scores |= {key: score for key, score in compute_metrics(p, test_y).items() if key != "accuracy"}
        if is_final:
            scores |= diagram_data(p, test_y)
            own_classes = torch.from_numpy(np.unique(world.y.numpy()[world.members[id].train]))
            if 0 < len(own_classes) < p.shape[1]:
                named = own_classes[test_logits[:, own_classes].argmax(dim=1)]
                scores["own_class_hits"] = int((named == test_y).sum())
        if is_final and world.details:
            scores |= prediction_details(p, test_y)
            scores |= {} if test_groups is None else {"groups": _number_groups(test_groups)}
    return scores


def first_of_group(groups: Tensor | None, n_val: int) -> NDArray[np.int64]:
    """Return the first test sample of each group, in the order of `pool_groups`."""
    assert groups is not None
    return np.unique(groups[n_val:].numpy(), return_index=True)[1]


def _number_groups(groups: Tensor) -> list[int]:
    """Number groups anew from 0, so that the bootstrap can resample them."""
    numbers: list[int] = torch.unique(groups, return_inverse=True)[1].tolist()
    return numbers


def pool_groups(logits: Tensor, y: Tensor, groups: Tensor, rule: GroupRule) -> tuple[Tensor, Tensor]:
    """Return one row of logits and one label per group; a finding is present if any of its images has it."""
    names, place = torch.unique(groups, return_inverse=True)
    index = place.reshape(-1, *[1] * (logits.ndim - 1)).expand_as(logits)
    empty = logits.new_zeros(len(names), *logits.shape[1:])
    pooled = empty.scatter_reduce(0, index, logits, "mean" if rule == "mean" else "amax", include_self=False)
    labels = y.new_full((len(names), *y.shape[1:]), -1)
    label_index = place.reshape(-1, *[1] * (y.ndim - 1)).expand_as(y)
    labels = labels.scatter_reduce(0, label_index, y, "amax")
    return pooled, labels


def limit_small_classes(world: World, id: str, client: Client) -> Client:
    """Remove the labels of classes with too few groups, so that a patient with 40 images counts once."""
    minimum = world.method.traits.classes.min_class_samples or 1
    if world.groups is None or minimum <= 1:
        return client
    groups = world.groups[torch.from_numpy(world.members[id].train)]
    labels = client.y if client.y.ndim == 2 else client.y[:, None]
    kept = []
    for column in labels.unbind(1):
        pairs = torch.unique(torch.stack([column, groups], dim=1), dim=0)
        counts = pairs[pairs[:, 0] >= 0, 0].bincount(minlength=1 + max(0, int(column.max())))
        kept.append(torch.where(counts[column.clamp(min=0)] >= minimum, column, -1))
    y = torch.stack(kept, dim=1) if client.y.ndim == 2 else kept[0]
    order = client.order
    if y.ndim == 1:
        order = torch.where(y[order.clamp(min=0)] >= 0, order, -1)
    return replace(client, y=y, order=order)
