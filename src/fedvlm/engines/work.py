"""What one client does in a round, whichever engine asks: take its rows, measure, update."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm import seeds
from fedvlm.channel import Channel
from fedvlm.core import Client, Frozen, Tensors


class Member(Protocol):
    """One client as row numbers of the table."""

    @property
    def train(self) -> NDArray[np.int64]: ...
    @property
    def validation(self) -> NDArray[np.int64]: ...
    @property
    def test(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class World:
    """What stays the same over the rounds of one training."""

    method: Any
    frozen: Frozen
    x: Tensor  # (rows, dim)
    y: Tensor  # (rows,)
    members: Mapping[str, Member]
    seed: int
    channel: Channel = field(default_factory=Channel)  # what an upload goes through on its way


@dataclass(frozen=True)
class Task:
    """One client's part of a round; it trains, or is only measured."""

    id: str
    sent: Tensors
    local: Tensors
    trains: bool


Scores = dict[str, float]  # loss, and rows and hits of the validation and the test split


@dataclass(frozen=True)
class Done:
    upload: Tensors | None  # None if the client was only measured
    local: Tensors
    scores: Scores  # of what the client was sent, before its update


def minibatches(world: World, id: str, number: int) -> Tensor:
    """(steps, batch) rows in this round's order; the last minibatch of an epoch may be short."""
    size, epochs = getattr(world.method, "batch", 32), getattr(world.method, "epochs", 1)
    rows = len(world.members[id].train)
    generator = seeds.generator("order", world.seed, id, number)
    steps = -(-rows // size)
    order = torch.full((epochs, steps * size), -1)
    for epoch in range(epochs):
        order[epoch, :rows] = torch.randperm(rows, generator=generator)
    return order.reshape(epochs * steps, size)


def gather(world: World, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    index = torch.from_numpy(rows)
    return world.x[index].float(), world.y[index]


def client(world: World, id: str, number: int) -> Client:
    member = world.members[id]
    order = minibatches(world, id, number)
    return Client(*gather(world, member.train), order, *gather(world, member.validation))


def pad(clients: Sequence[Client]) -> Client:
    """Clients of unequal size as one Client with a leading client axis."""

    def stack(parts: Iterable[Tensor], empty: int) -> Tensor:
        parts = list(parts)
        longest = max(part.shape[0] for part in parts)
        out = parts[0].new_full((len(parts), longest, *parts[0].shape[1:]), empty)
        for row, part in zip(out, parts, strict=True):
            row[: part.shape[0]] = part
        return out

    return Client(
        x=stack((one.x for one in clients), 0),
        y=stack((one.y for one in clients), -1),
        order=stack((one.order for one in clients), -1),
        held_x=stack((one.held_x for one in clients), 0),
        held_y=stack((one.held_y for one in clients), -1),
    )


def measure(world: World, sent: Tensors, local: Tensors, id: str) -> Scores:
    """Loss on the validation rows (training rows if there are none), hits there and on the test."""
    member = world.members[id]
    held = member.validation if len(member.validation) else member.train
    x, y = gather(world, np.concatenate([held, member.test]))
    logits = world.method.predict(world.frozen, sent, local, x)
    hits = logits.argmax(dim=1) == y
    loss = torch.nn.functional.cross_entropy(logits[: len(held)], y[: len(held)])
    return {
        "loss": loss.item(),
        "validation_rows": len(held),
        "validation_hits": int(hits[: len(held)].sum()),
        "test_rows": len(member.test),
        "test_hits": int(hits[len(held) :].sum()),
    }
