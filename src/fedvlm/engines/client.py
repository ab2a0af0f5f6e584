"""What one client does in a round, whichever engine asks: take its rows, measure, update."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from secrets import randbits
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm import seeds
from fedvlm.channel import Channel
from fedvlm.core import Client, Frozen, Method, Noisy, Tensors, schedule
from fedvlm.evaluate.metrics import diagrams, every_metric
from fedvlm.tensors import full

SLICE = 64 << 20  # bytes of rows that are predicted at once


class Member(Protocol):
    """One client as row numbers of the table."""

    @property
    def train(self) -> NDArray[np.int64]: ...
    @property
    def validation(self) -> NDArray[np.int64]: ...
    @property
    def test(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class Part:
    """Row numbers of one client, and nothing else about it."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


@dataclass(frozen=True)
class World:
    """What stays the same over the rounds of one training."""

    method: Method
    frozen: Frozen
    x: Any  # (rows, ...) in the view the method's needs ask for: a Tensor, or Rows
    y: Tensor  # (rows,)
    members: Mapping[str, Member]
    seed: int
    reference: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    texts: Mapping[str, Tensor] = field(default_factory=dict)  # descriptions of a client's own
    channel: Channel = field(default_factory=Channel)  # what an upload goes through on its way
    entropy: bool = False  # noise by the system's entropy instead of the seed, at a deployed site
    metrics: bool = False  # measure every metric in every round, not only at the end

    @cached_property
    def reference_x(self) -> Any:
        """(references, ...) gathered once, because every client has the same."""
        return gather(self, self.reference)[0]


@dataclass(frozen=True)
class Task:
    """One client's part of a round; it trains, or is only measured."""

    id: str
    sent: Tensors
    local: Tensors
    trains: bool
    held: Tensors | None = None  # local tensors of the best round so far, if one is chosen


Scores = dict[str, Any]  # loss, rows and hits of validation and test, and metrics of the test


@dataclass(frozen=True)
class Done:
    upload: Tensors | None  # None if the client was only measured
    local: Tensors
    scores: Scores  # of what the client was sent, before its update
    told: Mapping[str, float] | None = None  # by a client that keeps its local tensors to itself
    passed: bool = False  # the client has put its upload through the channel: it is as it travelled


def minibatches(world: World, id: str, number: int) -> Tensor:
    """(steps, batch) rows in this round's order; the last minibatch of an epoch may be short."""
    size, epochs = schedule(world.method).batch, schedule(world.method).epochs
    rows = len(world.members[id].train)
    generator = seeds.generator("order", world.seed, id, number)
    steps = -(-rows // size)
    order = torch.full((epochs, steps * size), -1)
    for epoch in range(epochs):
        order[epoch, :rows] = torch.randperm(rows, generator=generator)
    return order.reshape(epochs * steps, size)


def gather(world: World, rows: NDArray[np.int64]) -> tuple[Any, Tensor]:
    index = torch.from_numpy(rows)
    x = world.x[index] if isinstance(world.x, Tensor) else world.x.take(index)
    return x, world.y[index]


def client(world: World, id: str, number: int) -> Client:
    member = world.members[id]
    order = minibatches(world, id, number)
    count = world.method.noise(world.frozen) if isinstance(world.method, Noisy) else 0
    return Client(
        *gather(world, member.train),
        order,
        *gather(world, member.validation),
        world.reference_x,
        _reference_order(world, id, number, order),
        world.texts.get(id, torch.zeros(len(world.frozen.classes), 0, world.frozen.dim)),
        _noise(world, id, number, len(order), count),
    )


def _noise(world: World, id: str, number: int, steps: int, count: int) -> Tensor:
    return torch.randn(steps, count, generator=drawing(world, "noise", id, number))


def drawing(world: World, purpose: str, id: str, number: int) -> torch.Generator:
    """For noise: by seed in a simulation, from the system's entropy at a deployed site."""
    generator = seeds.generator(purpose, world.seed, id, number)
    return generator.manual_seed(randbits(63)) if world.entropy else generator


def _reference_order(world: World, id: str, number: int, order: Tensor) -> Tensor:
    """Rows of the reference beside each minibatch: shuffled, and from the start when used up."""
    rows = len(world.reference)
    if not rows:
        return order[:, :0]
    generator = seeds.generator("reference", world.seed, id, number)
    rounds = -(-order.numel() // rows)
    drawn = [torch.randperm(rows, generator=generator) for _ in range(rounds)]
    return torch.cat(drawn)[: order.numel()].reshape(order.shape)


def pad(clients: Sequence[Client]) -> Client:
    """Clients of unequal size as one Client with a leading client axis."""

    def stack(parts: Iterable[Tensor], empty: int) -> Tensor:
        parts = list(parts)
        first = parts[0]
        if all(part.data_ptr() == first.data_ptr() for part in parts) and first.numel():
            return first.expand(len(parts), *first.shape)
        sizes = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
        out = first.new_full((len(parts), *sizes), empty)
        for row, part in zip(out, parts, strict=True):
            row[tuple(slice(size) for size in part.shape)] = part
        return out

    absent = {"y": -1, "order": -1, "held_y": -1, "reference_order": -1}
    return Client(
        *(
            stack((getattr(one, part.name) for one in clients), absent.get(part.name, 0))
            for part in fields(Client)
        )
    )


def predict(world: World, sent: Tensors, local: Tensors, rows: NDArray[np.int64]) -> Tensor:
    """(rows, classes) logits, computed in slices where rows are large."""
    width = int(np.prod(world.x.shape[1:]))
    size = max(1, SLICE // (4 * width))
    return torch.cat(
        [
            world.method.predict(world.frozen, sent, local, full(world.x[torch.from_numpy(part)]))
            for part in np.split(rows, range(size, len(rows), size))
        ]
    )


def measure(world: World, sent: Tensors, local: Tensors, id: str, last: bool = False) -> Scores:
    """Loss on the validation rows (training rows if there are none), hits there and on the test.

    At the `last` time also the metrics of the test rows, with what their diagrams are drawn from.
    """
    member = world.members[id]
    held = member.validation if len(member.validation) else member.train
    rows = np.concatenate([held, member.test])
    y = world.y[torch.from_numpy(rows)]
    logits = predict(world, sent, local, rows)
    hits = logits.argmax(dim=1) == y
    loss = torch.nn.functional.cross_entropy(logits[: len(held)], y[: len(held)])
    scores: Scores = {
        "loss": loss.item(),
        "validation_rows": len(held),
        "validation_hits": int(hits[: len(held)].sum()),
        "test_rows": len(member.test),
        "test_hits": int(hits[len(held) :].sum()),
    }
    if len(member.test) and (last or world.metrics):
        p, truth = logits[len(held) :].softmax(dim=1), y[len(held) :]
        scores |= {key: one for key, one in every_metric(p, truth).items() if key != "accuracy"}
        if last:
            scores |= diagrams(p, truth)
    return scores
