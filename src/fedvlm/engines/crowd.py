"""Clients of a chunk side by side: their rows in one gather, their scores in one product."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from fedvlm.core import Client, Tensors, stacked
from fedvlm.engines.client import (
    SLICE,
    Part,
    Scores,
    Task,
    World,
    client,
    counted,
    judged,
    measure,
    predict,
)
from fedvlm.tensors import full

Rows = NDArray[np.int64]
WASTE = 2  # times the rows that padding may make of them


def numbered(world: World, rows: Rows) -> tuple[Tensor, Tensor]:
    """Row numbers in the place of the rows, and of their labels."""
    return world.x.new_empty(len(rows), 0), torch.from_numpy(rows)


def crowd(world: World, ids: Sequence[str], number: int) -> Client:
    """The clients as one with a leading client axis; `pad` of each would copy its rows twice."""
    bare = pad([client(world, id, number, numbered) for id in ids])
    x, y = filled(world, bare.y)
    held_x, held_y = filled(world, bare.held_y)
    return replace(bare, x=x, y=y, held_x=held_x, held_y=held_y)


def near(world: World, ids: Sequence[str]) -> World:
    """The same for some clients, whose rows are read at once where they are in a file."""
    if world.paged is None:
        return world
    each = [world.members[id] for id in ids]
    parts = [[one.train, one.validation, one.test, one.calibration] for one in each]
    rows = np.sort(np.concatenate([part for many in parts for part in many]))
    rows = rows[np.diff(rows, prepend=-1) > 0]  # a client may have everyone's
    members = {
        id: Part(*(np.searchsorted(rows, part) for part in many))
        for id, many in zip(ids, parts, strict=True)
    }
    y = world.y[torch.from_numpy(rows)]
    some = replace(world, x=world.paged.read(rows), y=y, members=members)
    # in the place of what these rows would give
    some.__dict__.update({"reference_x": world.reference_x, "crowded": world.crowded})
    return some


def pad(clients: Sequence[Client]) -> Client:
    """Clients of unequal size as one Client with a leading client axis."""

    def stack(parts: Iterable[Tensor], empty: int) -> Tensor:
        parts = list(parts)
        first = parts[0]
        where = first.data_ptr(), first.shape
        if all((part.data_ptr(), part.shape) == where for part in parts):  # or nothing, of nobody
            return first.expand(len(parts), *first.shape)
        if first.ndim and all(part.shape[1:] == first.shape[1:] for part in parts):
            return pad_sequence(parts, batch_first=True, padding_value=empty)
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


def filled(world: World, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(clients, longest, ...) rows and their labels; 0 and -1 where numbers end in -1."""
    real, index = rows >= 0, rows.clamp(min=0).flatten()
    x = world.read(index.numpy()).reshape(*rows.shape, *world.x.shape[1:])
    for one, count in zip(x, real.sum(1).tolist(), strict=True):
        one[count:] = 0
    return x, torch.where(real, world.y[index].reshape(rows.shape), -1)


def sent_to_all(tasks: Sequence[Task]) -> Tensors:
    """What each was sent, with a leading client axis; held once where it is the same."""
    first = tasks[0].sent
    return {
        key: value.expand(len(tasks), *value.shape)
        if all(task.sent[key] is value or torch.equal(task.sent[key], value) for task in tasks)
        else torch.stack([task.sent[key] for task in tasks])
        for key, value in first.items()
    }


def measured(world: World, tasks: Sequence[Task], sent: Tensors, local: Tensors) -> list[Scores]:
    """How each client fares with what it was sent; `sent` and `local` are those of all, stacked."""
    parts = [judged(world, task.id) for task in tasks]
    logits = None
    if not world.metrics and not local and all(one.stride(0) == 0 for one in sent.values()):
        logits = _of_one(world, tasks[0].sent, parts)
    elif not world.metrics:
        logits = _side_by_side(world, sent, local, parts)
    if logits is None:
        return [measure(world, task.sent, task.own, task.id) for task in tasks]
    y = world.y[torch.from_numpy(np.concatenate([rows for part in parts for rows in part]))]
    sizes = [len(rows) for part in parts for rows in part]
    losses = torch.split(torch.nn.functional.cross_entropy(logits, y, reduction="none"), sizes)
    right = np.cumsum([0, *(logits.argmax(1) == y).tolist()])
    hits = np.diff(right[np.cumsum([0, *sizes])]).tolist()
    return [
        counted(losses[i].mean().item(), sizes[i : i + 2], hits[i : i + 2])
        for i in range(0, len(sizes), 2)
    ]


def _of_one(world: World, sent: Tensors, parts: Sequence[tuple[Rows, Rows]]) -> Tensor:
    """(rows, classes) where everyone predicts alike: all rows are one client's."""
    return predict(world, sent, {}, np.concatenate([rows for part in parts for rows in part]))


def _side_by_side(
    world: World, sent: Tensors, local: Tensors, parts: Sequence[tuple[Rows, Rows]]
) -> Tensor | None:
    """(rows, classes) by a method whose clients are stacked, or None where that does not do."""
    each = [np.concatenate(part) for part in parts]
    real, longest = sum(map(len, each)), max(map(len, each))
    wide = world.x.ndim != 2 or len(each) * longest * 4 * world.x.shape[1] > SLICE
    if stacked(world.method) is None or wide or len(each) * longest > WASTE * real:
        return None
    places = torch.full((len(each), longest), -1)
    for place, rows in zip(places, each, strict=True):
        place[: len(rows)] = torch.from_numpy(rows)
    x = full(filled(world, places)[0])

    def alone(sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return world.method.predict(world.frozen, sent, local, x)

    # What all were sent stays one, so that a method works out once what it makes of it alone.
    same = {key: value.stride(0) == 0 for key, value in sent.items()}
    given = {key: value[0] if same[key] else value for key, value in sent.items()}
    axes = {key: None if same[key] else 0 for key in sent}
    try:
        return vmap(alone, (axes, 0, 0))(given, local, x)[places >= 0]
    except RuntimeError:  # a method that looks at values predicts client by client
        return None
