"""What one client does in a round, whichever engine asks: take its rows, measure, update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm import seeds
from fedvlm.channel import Channel
from fedvlm.core import Client, Frozen, Method, Noisy, Schedule, Tensors, schedule
from fedvlm.engines.attackers import Attack
from fedvlm.evaluate.metrics import details, diagrams, every_metric
from fedvlm.maths import noise
from fedvlm.storage.paged import Paged, paged
from fedvlm.tensors import full

SLICE = 64 << 20  # bytes of rows that are predicted at once
CROWD = 2000  # clients above which each one's scores are counts: their few rows give no curves


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
class Part:
    """Row numbers of one client, and nothing else about it."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]
    calibration: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True)
class Terms:
    """What everyone knows of a training, also a server that has no rows."""

    method: Method
    frozen: Frozen
    seed: int
    channel: Channel = field(default_factory=Channel)  # what an upload goes through on its way
    metrics: bool = False  # measure every metric in every round, not only at the end
    attack: Attack | None = None  # by some of the clients, in a simulation


@dataclass(frozen=True, kw_only=True)
class World(Terms):
    """The terms, and what only clients have: their rows."""

    x: Any  # (rows, ...) in the view the method's needs ask for: a Tensor, or Rows
    y: Tensor  # (rows,)
    members: Mapping[str, Member]
    reference: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    texts: Mapping[str, Tensor] = field(default_factory=dict)  # descriptions of a client's own
    entropy: bool = False  # noise by the system's entropy instead of the seed, at a deployed site
    details: bool = False  # tell row by row in the end; never at a deployed site

    @cached_property
    def reference_x(self) -> Any:
        """(references, ...) gathered once, because every client has the same."""
        return gather(self, self.reference)[0]

    @cached_property
    def paged(self) -> Paged | None:
        return paged(self.x)

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        """(rows, ...) in memory, in the precision in which they are kept."""
        at, x = torch.from_numpy(rows), self.x
        if not isinstance(x, Tensor):
            return torch.as_tensor(x[at])
        return self.paged.take(rows) if self.paged else x.index_select(0, at.to(x.device))

    @cached_property
    def crowded(self) -> bool:
        return len(self.members) > CROWD

    @cached_property
    def pace(self) -> Schedule:
        return schedule(self.method)

    @cached_property
    def noises(self) -> int:
        """Standard normal numbers that each step is given."""
        return self.method.noise(self.frozen) if isinstance(self.method, Noisy) else 0


@dataclass(frozen=True)
class Kept:
    """What stands at a server for local tensors that are at their client: which version of them.

    A version is the number of the round that made it plus one, and 0 before any.
    """

    version: int = 0
    names: tuple[str, ...] = ()  # of the tensors, as far as the server was told


Local = Tensors | Kept


def names(local: Local) -> list[str]:
    return list(local.names if isinstance(local, Kept) else local)


def here(local: Local) -> Tensors:
    """Local tensors, where the clients are in this very process."""
    assert not isinstance(local, Kept), "these local tensors are at their client"
    return local


@dataclass(frozen=True)
class Task:
    """One client's part of a round; it trains, or is only measured."""

    id: str
    sent: Tensors
    local: Local
    trains: bool
    held: Local | None = None  # local tensors of the best round so far, if one is chosen

    @property
    def own(self) -> Tensors:
        return here(self.local)


Take = Callable[[World, NDArray[np.int64]], tuple[Any, Tensor]]  # rows and labels by number
Scores = dict[str, Any]  # loss, rows and hits of validation and test, and metrics of the test


@dataclass(frozen=True)
class Done:
    upload: Tensors | None  # None if the client was only measured
    local: Local
    scores: Scores  # of what the client was sent, before its update
    rows: int  # that it trains on: what its upload weighs
    described: Mapping[str, float] | None = None  # by a client that keeps its local tensors
    passed: bool = False  # the client has put its upload through the channel: it is as it travelled
    releases: int = 0  # uploads of this training that have left it, by its own count; 0: not said

    @property
    def own(self) -> Tensors:
        return here(self.local)


@dataclass(frozen=True)
class Answers:
    """What came of a round: of those who answered, who did not, and why."""

    done: Mapping[str, Done]
    missing: Mapping[str, str] = field(default_factory=dict)
    total: Tensors | None = None  # of the uploads, if a secure sum is all there is of them
    least: int = 0  # how many must be left if some are refused later


def minibatches(world: World, id: str, number: int) -> Tensor:
    """(steps, batch) rows in this round's order; the last minibatch of an epoch may be short."""
    rows = len(world.members[id].train)
    epochs, each, size = world.pace.steps(rows)
    generator = seeds.generator("order", world.seed, id, number)
    order = torch.full((epochs, each * size), -1)
    for epoch in range(epochs):
        order[epoch, :rows] = torch.randperm(rows, generator=generator)
    return order.reshape(epochs * each, size)


def gather(world: World, rows: NDArray[np.int64]) -> tuple[Any, Tensor]:
    index = torch.from_numpy(rows)
    x = world.read(rows) if isinstance(world.x, Tensor) else world.x.take(index)
    return x, world.y[index]


def own_world(world: World, id: str) -> World:
    """The world as one client has it: no row of another, but for the public reference."""
    member = world.members[id]
    parts = (member.train, member.validation, member.test, member.calibration, world.reference)
    rows = np.concatenate(parts)
    places = np.split(np.arange(len(rows)), np.cumsum([len(part) for part in parts])[:-1])
    x, y = gather(world, rows)
    return replace(
        world,
        x=x,
        y=y,
        members={id: Part(*places[:4])},
        reference=places[4],
        texts={id: world.texts[id]} if id in world.texts else {},
    )


def client(world: World, id: str, number: int, take: Take = gather) -> Client:
    member = world.members[id]
    order = minibatches(world, id, number)
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
    count = world.noises
    if not count:
        return torch.zeros(steps, 0)
    if world.entropy:
        return noise.secret(steps, count)
    return torch.randn(steps, count, generator=seeds.generator("noise", world.seed, id, number))


def drawing(world: World, id: str, number: int) -> noise.Draw:
    """A channel's noise: by seed in a simulation, of the system's entropy at a deployed site."""
    if world.entropy:
        return noise.secret
    return noise.seeded(seeds.generator("channel noise", world.seed, id, number))


def _reference_order(world: World, id: str, number: int, order: Tensor) -> Tensor:
    """Rows of the reference beside each minibatch: shuffled, and from the start when used up."""
    rows = len(world.reference)
    if not rows:
        return order[:, :0]
    generator = seeds.generator("reference", world.seed, id, number)
    rounds = -(-order.numel() // rows)
    drawn = [torch.randperm(rows, generator=generator) for _ in range(rounds)]
    return torch.cat(drawn)[: order.numel()].reshape(order.shape)


def predict(world: World, sent: Tensors, local: Tensors, rows: NDArray[np.int64]) -> Tensor:
    """(rows, classes) logits, computed in slices where rows are large."""
    width = int(np.prod(world.x.shape[1:]))
    size = max(1, SLICE // (4 * width))
    return torch.cat(
        [
            world.method.predict(world.frozen, sent, local, full(world.read(part)))
            for part in np.split(rows, range(size, len(rows), size))
        ]
    )


def judged(world: World, id: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows a client is judged by: validation (training if there are none), and test."""
    member = world.members[id]
    return (member.validation if len(member.validation) else member.train), member.test


def counted(loss: float, rows: Sequence[int], hits: Sequence[int]) -> Scores:
    """As it is recorded; rows and hits are of validation and test. Of no rows there is no loss."""
    return {
        **({"loss": loss} if rows[0] else {}),
        "validation_rows": rows[0],
        "validation_hits": hits[0],
        "test_rows": rows[1],
        "test_hits": hits[1],
    }


def measure(world: World, sent: Tensors, local: Tensors, id: str, last: bool = False) -> Scores:
    """Loss on the validation rows (training rows if there are none), hits there and on the test.

    At the `last` time also, but for a crowd, the metrics of the test rows, with what their diagrams
    are drawn from, and in a simulation the rows' hits and the confusion matrix.
    """
    held, test = judged(world, id)
    rows = np.concatenate([held, test])
    y = world.y[torch.from_numpy(rows)]
    logits = predict(world, sent, local, rows)
    hits = logits.argmax(dim=1) == y
    loss = torch.nn.functional.cross_entropy(logits[: len(held)], y[: len(held)])
    right = [int(hits[: len(held)].sum()), int(hits[len(held) :].sum())]
    scores = counted(loss.item(), [len(held), len(test)], right)
    last = last and not world.crowded
    if len(test) and (last or world.metrics):
        p, truth = logits[len(held) :].softmax(dim=1), y[len(held) :]
        scores |= {key: one for key, one in every_metric(p, truth).items() if key != "accuracy"}
        if last:
            scores |= diagrams(p, truth)
        if last and world.details:
            scores |= details(p, truth)
    return scores
