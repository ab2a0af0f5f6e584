"""What one client does in a round, whichever engine asks: take its rows, measure, update."""

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
from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import compute_metrics, diagram_data, prediction_details
from fedvlm.maths import privacy
from fedvlm.storage.large_tensors import PagedRows, page_rows
from fedvlm.tensors import to_float32

PREDICTION_BYTES = 64 << 20  # bytes of rows that are predicted at once
MANY_CLIENTS = 2000  # clients above which each one's scores are counts: their few rows give no curves


class Member(Protocol):
    """One client as row numbers of the table."""

    @property
    def train(self) -> NDArray[np.int64]: ...
    @property
    def validation(self) -> NDArray[np.int64]: ...
    @property
    def test(self) -> NDArray[np.int64]: ...
    @property
    def calibration(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class ClientRows:
    """Row numbers of one client, and nothing else about it."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]
    calibration: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


Kind = Literal["none", "sign-flip", "scale", "label-flip", "noise", "collude"]


DEFAULT_STRENGTH = {"sign-flip": 10.0, "scale": 10.0, "noise": 10.0, "collude": 1.5, "label-flip": 1.0}


@dataclass(frozen=True)
class Attack:
    kind: Kind
    fraction: float  # of the training clients
    strength: float = 0.0  # 0: the usual one

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise SettingsError(f"attacker_fraction = {self.fraction} is outside (0, 1); 0.1 is one of ten")
        if not 0 <= self.strength < float("inf"):
            raise SettingsError(f"attack_strength = {self.strength}; it takes 0 (the usual) or more")
        if self.kind == "label-flip" and self.strength > 1:
            raise SettingsError(
                f"attack_strength = {self.strength} of label-flip is the share of rows; it is at most 1"
            )

    @property
    def effective_strength(self) -> float:
        return self.strength or DEFAULT_STRENGTH[self.kind]


def choose_attackers(attack: Attack, ids: Sequence[str], seed: int) -> set[str]:
    """Who attacks, drawn by seed; at least one client."""
    ordered = sorted(ids)
    count = max(1, round(attack.fraction * len(ordered)))
    drawn = torch.randperm(len(ordered), generator=seeds.generator("attackers", seed))
    return {ordered[i] for i in drawn[:count].tolist()}


@dataclass(frozen=True)
class TrainingTerms:
    """What everyone knows of a training, also a server that has no rows."""

    method: Method
    frozen: Frozen
    seed: int
    channel: Channel = field(default_factory=Channel)  # what an upload goes through on its way
    metrics: bool = False  # measure every metric in every round, not only at the end
    attack: Attack | None = None  # by some of the clients, in a simulation


@dataclass(frozen=True, kw_only=True)
class World(TrainingTerms):
    """The terms, and what only clients have: their rows."""

    x: Any  # (rows, ...) in the view the method's needs ask for: a Tensor, or Rows
    y: Tensor  # (rows,)
    members: Mapping[str, Member]
    reference: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    texts: Mapping[str, Tensor] = field(default_factory=dict)  # descriptions of a client's own
    secret_noise: bool = False  # noise by the system's entropy instead of the seed, at a deployed site
    details: bool = False  # tell row by row in the end; never at a deployed site

    @cached_property
    def reference_x(self) -> Any:
        """(references, ...) gathered once, because every client has the same."""
        return gather_rows(self, self.reference)[0]

    @cached_property
    def file_rows(self) -> PagedRows | None:
        return page_rows(self.x)

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        """(rows, ...) in memory, in the precision in which they are kept."""
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
        """Standard normal numbers that each step is given."""
        return self.method.noise(self.frozen) if isinstance(self.method, Noisy) else 0


@dataclass(frozen=True)
class RemoteState:
    """What stands at a server for local tensors that are at their client: which version of them.

    A version is the number of the round that made it plus one, and 0 before any.
    """

    version: int = 0
    names: tuple[str, ...] = ()  # of the tensors, as far as the server was told


Local = Tensors | RemoteState


def local_names(local: Local) -> list[str]:
    return list(local.names if isinstance(local, RemoteState) else local)


def as_tensors(local: Local) -> Tensors:
    """Local tensors, where the clients are in this very process."""
    assert not isinstance(local, RemoteState), "these local tensors are at their client"
    return local


@dataclass(frozen=True)
class Task:
    """One client's part of a round; it trains, or is only measured."""

    id: str
    sent: Tensors
    local: Local
    trains: bool
    best_local: Local | None = None  # local tensors of the best round so far, if one is chosen

    @property
    def local_tensors(self) -> Tensors:
        return as_tensors(self.local)


GatherRows = Callable[[World, NDArray[np.int64]], tuple[Any, Tensor]]  # rows and labels by number
Scores = dict[str, Any]  # loss, rows and hits of validation and test, and metrics of the test


@dataclass(frozen=True)
class ClientReply:
    upload: Tensors | None  # None if the client was only measured
    local: Local
    scores: Scores  # of what the client was sent, before its update
    rows: int  # that it trains on: what its upload weighs
    description: Mapping[str, float] | None = None  # by a client that keeps its local tensors
    is_encoded: bool = False  # the client has put its upload through the channel: it is as it travelled
    releases: int = 0  # uploads of this training that have left it, by its own count; 0: not said

    @property
    def local_tensors(self) -> Tensors:
        return as_tensors(self.local)


@dataclass(frozen=True)
class RoundReplies:
    """What came of a round: of those who answered, who did not, and why."""

    replies: Mapping[str, ClientReply]
    missing: Mapping[str, str] = field(default_factory=dict)
    secure_sum: Tensors | None = None  # of the uploads, if a secure sum is all there is of them
    min_clients: int = 0  # how many must be left if some are refused later


def minibatch_order(world: World, id: str, number: int) -> Tensor:
    """(steps, batch) rows in this round's order; the last minibatch of an epoch may be short."""
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
    """The world as one client has it: no row of another, but for the public reference."""
    member = world.members[id]
    parts = (member.train, member.validation, member.test, member.calibration, world.reference)
    rows = np.concatenate(parts)
    places = np.split(np.arange(len(rows)), np.cumsum([len(part) for part in parts])[:-1])
    x, y = gather_rows(world, rows)
    return replace(
        world,
        x=x,
        y=y,
        members={id: ClientRows(*places[:4])},
        reference=places[4],
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
    )


def _noise(world: World, id: str, number: int, steps: int) -> Tensor:
    count = world.noise_size
    if not count:
        return torch.zeros(steps, 0)
    if world.secret_noise:
        return privacy.secure_normal(steps, count)
    return torch.randn(steps, count, generator=seeds.generator("noise", world.seed, id, number))


def channel_noise(world: World, id: str, number: int) -> privacy.Draw:
    """A channel's noise: by seed in a simulation, of the system's entropy at a deployed site."""
    if world.secret_noise:
        return privacy.secure_normal
    return privacy.seeded_normal(seeds.generator("channel noise", world.seed, id, number))


def _reference_order(world: World, id: str, number: int, order: Tensor) -> Tensor:
    """Rows of the reference beside each minibatch: shuffled, and from the start when used up."""
    rows = len(world.reference)
    if not rows:
        return order[:, :0]
    generator = seeds.generator("reference", world.seed, id, number)
    rounds = -(-order.numel() // rows)
    permutations = [torch.randperm(rows, generator=generator) for _ in range(rounds)]
    return torch.cat(permutations)[: order.numel()].reshape(order.shape)


def predict(world: World, sent: Tensors, local: Tensors, rows: NDArray[np.int64]) -> Tensor:
    """(rows, classes) logits, computed in slices where rows are large."""
    width = int(np.prod(world.x.shape[1:]))
    size = max(1, PREDICTION_BYTES // (4 * width))
    return torch.cat(
        [
            world.method.predict(world.frozen, sent, local, to_float32(world.read(part)))
            for part in np.split(rows, range(size, len(rows), size))
        ]
    )


def evaluation_rows(world: World, id: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows a client is judged by: validation (training if there are none), and test."""
    member = world.members[id]
    return (member.validation if len(member.validation) else member.train), member.test


def score_counts(loss: float, rows: Sequence[int], n_correct: Sequence[int]) -> Scores:
    """As it is recorded; rows and hits are of validation and test. Of no rows there is no loss."""
    return {
        **({"loss": loss} if rows[0] else {}),
        "validation_rows": rows[0],
        "validation_hits": n_correct[0],
        "test_rows": rows[1],
        "test_hits": n_correct[1],
    }


def measure(world: World, sent: Tensors, local: Tensors, id: str, last: bool = False) -> Scores:
    """Loss on the validation rows (training rows if there are none), hits there and on the test.

    At the `last` time also, but for a crowd, the metrics of the test rows, with what their diagrams
    are drawn from, and in a simulation the rows' hits and the confusion matrix.
    """
    val_rows, test = evaluation_rows(world, id)
    rows = np.concatenate([val_rows, test])
    y = world.y[torch.from_numpy(rows)]
    logits = predict(world, sent, local, rows)
    is_correct = logits.argmax(dim=1) == y
    loss = torch.nn.functional.cross_entropy(logits[: len(val_rows)], y[: len(val_rows)])
    n_correct = [int(is_correct[: len(val_rows)].sum()), int(is_correct[len(val_rows) :].sum())]
    scores = score_counts(loss.item(), [len(val_rows), len(test)], n_correct)
    last = last and not world.has_many_clients
    if len(test) and (last or world.metrics):
        p, truth = logits[len(val_rows) :].softmax(dim=1), y[len(val_rows) :]
        scores |= {key: score for key, score in compute_metrics(p, truth).items() if key != "accuracy"}
        if last:
            scores |= diagram_data(p, truth)
        if last and world.details:
            scores |= prediction_details(p, truth)
    return scores
