"""Clients of a chunk side by side: their rows in one gather, their scores in one product."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from fedvlm.core import Client, Tensors, as_stacked
from fedvlm.engines.client import (
    PREDICTION_BYTES,
    ClientRows,
    Scores,
    Task,
    World,
    evaluation_rows,
    make_client,
    measure,
    predict,
    score_counts,
)
from fedvlm.tensors import to_float32

Rows = NDArray[np.int64]
MAX_PADDING_RATIO = 2  # times the rows that padding may make of them


def row_numbers(world: World, rows: Rows) -> tuple[Tensor, Tensor]:
    """Row numbers in the place of the rows, and of their labels."""
    return world.x.new_empty(len(rows), 0), torch.from_numpy(rows)


def stack_clients(world: World, ids: Sequence[str], number: int) -> Client:
    """The clients as one with a leading client axis; `pad` of each would copy its rows twice."""
    bare = pad_clients([make_client(world, id, number, row_numbers) for id in ids])
    x, y = fill_rows(world, bare.y)
    val_x, val_y = fill_rows(world, bare.val_y)
    return replace(bare, x=x, y=y, val_x=val_x, val_y=val_y)


def load_chunk(world: World, ids: Sequence[str]) -> World:
    """The same for some clients, whose rows are read at once where they are in a file."""
    if world.file_rows is None:
        return world
    chunk_members = [world.members[id] for id in ids]
    parts = [[member.train, member.validation, member.test, member.calibration] for member in chunk_members]
    rows = np.sort(np.concatenate([part for splits in parts for part in splits]))
    rows = rows[np.diff(rows, prepend=-1) > 0]  # a client may have everyone's
    members = {
        id: ClientRows(*(np.searchsorted(rows, part) for part in splits)) for id, splits in zip(ids, parts, strict=True)
    }
    y = world.y[torch.from_numpy(rows)]
    chunk_world = replace(world, x=world.file_rows.read(rows), y=y, members=members)
    # in the place of what these rows would give
    chunk_world.__dict__.update({"reference_x": world.reference_x, "has_many_clients": world.has_many_clients})
    return chunk_world


def pad_clients(clients: Sequence[Client]) -> Client:
    """Clients of unequal size as one Client with a leading client axis."""

    def stack(parts: Iterable[Tensor], empty: int) -> Tensor:
        parts = list(parts)
        first = parts[0]
        storage = first.data_ptr(), first.shape
        if all((part.data_ptr(), part.shape) == storage for part in parts):  # or nothing, of nobody
            return first.expand(len(parts), *first.shape)
        if first.ndim and all(part.shape[1:] == first.shape[1:] for part in parts):
            return pad_sequence(parts, batch_first=True, padding_value=empty)
        sizes = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
        out = first.new_full((len(parts), *sizes), empty)
        for row, part in zip(out, parts, strict=True):
            row[tuple(slice(size) for size in part.shape)] = part
        return out

    padding_values = {"y": -1, "order": -1, "val_y": -1, "reference_order": -1}
    return Client(
        *(
            stack((getattr(client_data, part.name) for client_data in clients), padding_values.get(part.name, 0))
            for part in fields(Client)
        )
    )


def fill_rows(world: World, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(clients, longest, ...) rows and their labels; 0 and -1 where numbers end in -1."""
    real, index = rows >= 0, rows.clamp(min=0).flatten()
    x = world.read(index.numpy()).reshape(*rows.shape, *world.x.shape[1:])
    for client_rows, count in zip(x, real.sum(1).tolist(), strict=True):
        client_rows[count:] = 0
    return x, torch.where(real, world.y[index].reshape(rows.shape), -1)


def stack_sent(tasks: Sequence[Task]) -> Tensors:
    """What each was sent, with a leading client axis; held once where it is the same."""
    first = tasks[0].sent
    return {
        key: value.expand(len(tasks), *value.shape)
        if all(task.sent[key] is value or torch.equal(task.sent[key], value) for task in tasks)
        else torch.stack([task.sent[key] for task in tasks])
        for key, value in first.items()
    }


def measure_chunk(world: World, tasks: Sequence[Task], sent: Tensors, local: Tensors) -> list[Scores]:
    """How each client fares with what it was sent; `sent` and `local` are those of all, stacked."""
    parts = [evaluation_rows(world, task.id) for task in tasks]
    logits = None
    if not world.metrics and not local and all(tensor.stride(0) == 0 for tensor in sent.values()):
        logits = _predict_common(world, tasks[0].sent, parts)
    elif not world.metrics:
        logits = _predict_stacked(world, sent, local, parts)
    if logits is None:
        return [measure(world, task.sent, task.local_tensors, task.id) for task in tasks]
    y = world.y[torch.from_numpy(np.concatenate([rows for part in parts for rows in part]))]
    sizes = [len(rows) for part in parts for rows in part]
    losses = torch.split(torch.nn.functional.cross_entropy(logits, y, reduction="none"), sizes)
    cumulative_correct = np.cumsum([0, *(logits.argmax(1) == y).tolist()])
    n_correct = np.diff(cumulative_correct[np.cumsum([0, *sizes])]).tolist()
    return [
        score_counts(losses[i].mean().item(), sizes[i : i + 2], n_correct[i : i + 2]) for i in range(0, len(sizes), 2)
    ]


def _predict_common(world: World, sent: Tensors, parts: Sequence[tuple[Rows, Rows]]) -> Tensor:
    """(rows, classes) where everyone predicts alike: all rows are one client's."""
    return predict(world, sent, {}, np.concatenate([rows for part in parts for rows in part]))


def _predict_stacked(world: World, sent: Tensors, local: Tensors, parts: Sequence[tuple[Rows, Rows]]) -> Tensor | None:
    """(rows, classes) by a method whose clients are stacked, or None where that does not do."""
    rows_by_client = [np.concatenate(part) for part in parts]
    real, longest = sum(map(len, rows_by_client)), max(map(len, rows_by_client))
    is_large = world.x.ndim != 2 or len(rows_by_client) * longest * 4 * world.x.shape[1] > PREDICTION_BYTES
    if as_stacked(world.method) is None or is_large or len(rows_by_client) * longest > MAX_PADDING_RATIO * real:
        return None
    places = torch.full((len(rows_by_client), longest), -1)
    for place, rows in zip(places, rows_by_client, strict=True):
        place[: len(rows)] = torch.from_numpy(rows)
    x = to_float32(fill_rows(world, places)[0])

    def predict_one(sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return world.method.predict(world.frozen, sent, local, x)

    # What all were sent stays one, so that a method works out once what it makes of it alone.
    is_common = {key: value.stride(0) == 0 for key, value in sent.items()}
    shared_or_stacked = {key: value[0] if is_common[key] else value for key, value in sent.items()}
    axes = {key: None if is_common[key] else 0 for key in sent}
    try:
        return vmap(predict_one, (axes, 0, 0))(shared_or_stacked, local, x)[places >= 0]
    except RuntimeError:  # a method that looks at values predicts client by client
        return None
