"""Chunks of stacked clients: their samples in one gather, their updates in one vmap, their scores in one product."""

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from fedvlm import tensors
from fedvlm.core import Client, Tensors, as_stacked
from fedvlm.engines import client
from fedvlm.engines.sequential import adapt_client, failure, run_client
from fedvlm.errors import FedVLMError
from fedvlm.parts.bodies import adapts
from fedvlm.tensors import to_float32

Rows = NDArray[np.int64]
MAX_PADDING_RATIO = 2  # padded rows relative to samples, above which clients are predicted one by one


def row_numbers(world: client.World, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return row numbers in place of samples and labels."""
    return world.x.new_empty(len(rows), 0), torch.from_numpy(rows)


def stack_clients(world: client.World, ids: Sequence[str], number: int) -> Client:
    """Stack clients along a leading axis; `pad_clients` of their samples would copy them twice."""
    bare = pad_clients([client.make_client(world, id, number, row_numbers) for id in ids])
    x, y = fill_rows(world, bare.y)
    val_x, val_y = fill_rows(world, bare.val_y)
    stacked = replace(bare, x=x, y=y, val_x=val_x, val_y=val_y)
    if not world.method.traits.training.unlabelled:
        return stacked
    rows = [torch.from_numpy(world.members[id].unlabelled) for id in ids]
    return replace(stacked, unlabelled=fill_rows(world, pad_sequence(rows, batch_first=True, padding_value=-1))[0])


def load_chunk(world: client.World, ids: Sequence[str]) -> client.World:
    """Return the world of some clients, with their samples read at once if they are in a file."""
    if world.file_rows is None:
        return world
    chunk_members = [world.members[id] for id in ids]
    parts = [client.member_rows(member) for member in chunk_members]
    rows = np.sort(np.concatenate([part for splits in parts for part in splits]))
    rows = rows[np.diff(rows, prepend=-1) > 0]  # a client may have everyone's samples
    members = {
        id: client.ClientRows(*(np.searchsorted(rows, part) for part in splits))
        for id, splits in zip(ids, parts, strict=True)
    }
    y = world.y[torch.from_numpy(rows)]
    groups = None if world.groups is None else world.groups[torch.from_numpy(rows)]
    chunk_world = replace(world, x=world.file_rows.read(rows), y=y, groups=groups, members=members)
    # as in the full world, not as these samples would give
    chunk_world.__dict__.update({"reference_x": world.reference_x, "has_many_clients": world.has_many_clients})
    return chunk_world


def pad_clients(clients: Sequence[Client]) -> Client:
    """Stack clients of unequal size along a leading axis, with padding."""

    def stack(parts: Iterable[Tensor], empty: int) -> Tensor:
        parts = list(parts)
        first = parts[0]
        storage = first.data_ptr(), first.shape
        if all((part.data_ptr(), part.shape) == storage for part in parts):  # also if it is empty for all
            return first.expand(len(parts), *first.shape)
        if first.ndim and all(part.shape[1:] == first.shape[1:] for part in parts):
            return pad_sequence(parts, batch_first=True, padding_value=empty)
        sizes = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
        out = first.new_full((len(parts), *sizes), empty)
        for row, part in zip(out, parts, strict=True):
            row[tuple(slice(size) for size in part.shape)] = part
        return out

    padding_values = {"y": -1, "order": -1, "val_y": -1, "reference_order": -1}
    names = [part.name for part in fields(Client)]
    return Client(*(stack((getattr(one, key) for one in clients), padding_values.get(key, 0)) for key in names))


def fill_rows(world: client.World, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return samples (clients, longest, ...) and labels; 0 and -1 where a row number is -1."""
    real, index = rows >= 0, rows.clamp(min=0).flatten()
    x = world.read(index.numpy()).reshape(*rows.shape, *world.x.shape[1:])
    for client_rows, count in zip(x, real.sum(1).tolist(), strict=True):
        client_rows[count:] = 0
    y = world.y[index].reshape(*rows.shape, *world.y.shape[1:])
    return x, torch.where(real.reshape(*rows.shape, *[1] * (y.ndim - rows.ndim)), y, -1)


def stack_sent(tasks: Sequence[client.Task]) -> Tensors:
    """Stack what each client was sent; what is the same for all is stored once."""
    first = tasks[0].sent
    return {
        key: value.expand(len(tasks), *value.shape)
        if all(task.sent[key] is value or torch.equal(task.sent[key], value) for task in tasks)
        else torch.stack([task.sent[key] for task in tasks])
        for key, value in first.items()
    }


def measure_chunk(
    world: client.World, tasks: Sequence[client.Task], sent: Tensors, local: Tensors
) -> list[client.Scores]:
    """Return every client's scores with what it was sent; `sent` and `local` are stacked."""
    parts = [client.evaluation_rows(world, task.id) for task in tasks]
    logits = None
    if world.frozen.multi_label or (world.groups is not None and world.group_metrics != "image"):
        return [client.measure(world, task.sent, task.local_tensors, task.id) for task in tasks]
    if not world.metrics and not local and all(tensor.stride(0) == 0 for tensor in sent.values()):
        rows = np.concatenate([rows for part in parts for rows in part])
        logits = client.predict(world, tasks[0].sent, {}, rows)  # all clients predict alike
    elif not world.metrics:
        logits = _predict_stacked(world, sent, local, parts)
    if logits is None:
        return [client.measure(world, task.sent, task.local_tensors, task.id) for task in tasks]
    y = world.y[torch.from_numpy(np.concatenate([rows for part in parts for rows in part]))]
    sizes = [len(rows) for part in parts for rows in part]
    losses = torch.split(torch.nn.functional.cross_entropy(logits, y, reduction="none"), sizes)
    cumulative_correct = np.cumsum([0, *(logits.argmax(1) == y).tolist()])
    n_correct = np.diff(cumulative_correct[np.cumsum([0, *sizes])]).tolist()
    return [
        client.score_counts(losses[i].mean().item(), sizes[i : i + 2], n_correct[i : i + 2])
        for i in range(0, len(sizes), 2)
    ]


def _predict_stacked(
    world: client.World, sent: Tensors, local: Tensors, parts: Sequence[tuple[Rows, Rows]]
) -> Tensor | None:
    """Return logits (samples, classes) of stacked clients, or None if they cannot be stacked."""
    rows_by_client = [np.concatenate(part) for part in parts]
    real, longest = sum(map(len, rows_by_client)), max(map(len, rows_by_client))
    is_large = world.x.ndim != 2 or len(rows_by_client) * longest * 4 * world.x.shape[1] > client.PREDICTION_BYTES
    if as_stacked(world.method) is None or is_large or len(rows_by_client) * longest > MAX_PADDING_RATIO * real:
        return None
    places = torch.full((len(rows_by_client), longest), -1)
    for place, rows in zip(places, rows_by_client, strict=True):
        place[: len(rows)] = torch.from_numpy(rows)
    x = to_float32(fill_rows(world, places)[0])

    def predict_one(sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return world.method.predict(world.frozen, sent, local, x)

    # What is the same for all is not stacked, so that a method derives from it only once.
    is_common = {key: value.stride(0) == 0 for key, value in sent.items()}
    shared_or_stacked = {key: value[0] if is_common[key] else value for key, value in sent.items()}
    axes = {key: None if is_common[key] else 0 for key in sent}
    try:
        return vmap(predict_one, (axes, 0, 0))(shared_or_stacked, local, x)[places >= 0]
    except RuntimeError:  # a method with data-dependent control flow predicts client by client
        return None


CHUNK_ROW_BYTES = 8 << 20  # bytes of the padded samples of a chunk
CHUNK_LOCAL_BYTES = 1 << 20  # bytes of the local tensors of a chunk: large ones gain nothing from stacking
MAX_CLIENTS_PER_CHUNK = 32


def make_chunks(world: client.World, tasks: Sequence[client.Task], chunk_factor: int = 1) -> list[list[client.Task]]:
    """Group tasks by size, largest first, so that little is padded and processes end together."""
    width = 4 * prod(world.x.shape[1:])
    out: list[list[client.Task]] = []
    longest = local_bytes = 0
    count = {task.id: len(world.members[task.id].train) for task in tasks}
    for task in sorted(tasks, key=lambda t: (not t.trains, -count[t.id], t.id)):
        rows = max(1, count[task.id])
        local = tensors.count_bytes(task.local_tensors)
        fits = (
            bool(out)
            and out[-1][0].trains == task.trains
            and have_same_shapes(out[-1][0], task)
            and len(out[-1]) < chunk_factor * MAX_CLIENTS_PER_CHUNK
            and (len(out[-1]) + 1) * longest * width <= chunk_factor * CHUNK_ROW_BYTES
            and local_bytes + local <= chunk_factor * CHUNK_LOCAL_BYTES
        )
        if fits:
            out[-1].append(task)
            local_bytes += local
        else:
            out.append([task])
            longest, local_bytes = rows, local
    return out


def have_same_shapes(a: client.Task, b: client.Task) -> bool:
    """Tell whether the tensors of two clients have the same names and shapes."""
    pairs = ((a.sent, b.sent), (a.local_tensors, b.local_tensors))
    shapes = [[{key: value.shape for key, value in held.items()} for held in pair] for pair in pairs]
    return all(of_a == of_b for of_a, of_b in shapes)


@tensors.without_compiler()
def run_chunk(world: client.World, number: int, tasks: Sequence[client.Task]) -> dict[str, client.ClientReply]:
    """Run a chunk; if it fails, run its clients one by one, so that the error can name the client."""
    # A tower fills a core by itself, and Adam amplifies the rounding errors of a zero gradient.
    one_by_one = "image tower" in world.method.traits.needs or not isinstance(world.x, Tensor)
    # Classes are counted in groups client by client.
    one_by_one |= world.groups is not None and (world.method.traits.classes.min_class_samples or 1) > 1
    world = load_chunk(world, [task.id for task in tasks])
    if not tasks[0].trains or one_by_one:
        return {task.id: run_client(world, number, task) for task in tasks}
    try:
        return run_stacked(world, number, tasks)
    except FedVLMError:
        raise
    except Exception as error:
        for task in tasks:
            run_client(world, number, task)
        ids = [task.id for task in tasks]
        raise failure(world, number, ids, traceback.format_exc()) from error


@tensors.without_compiler()
def adapt_chunk(world: client.World, number: int, tasks: Sequence[client.Task]) -> dict[str, client.ClientReply]:
    """Adapt and measure the clients of a chunk; without adaptation many clients are measured in one product."""
    world = load_chunk(world, [task.id for task in tasks])
    if not world.has_many_clients or adapts(world.method) or not isinstance(world.x, Tensor):
        return {task.id: adapt_client(world, number, task) for task in tasks}
    sent, local = stack_sent(tasks), tensors.stack([task.local_tensors for task in tasks])
    scores = measure_chunk(world, tasks, sent, local)
    return {
        task.id: client.ClientReply(None, task.local_tensors, scores[i], len(world.members[task.id].train))
        for i, task in enumerate(tasks)
    }


def run_stacked(world: client.World, number: int, tasks: Sequence[client.Task]) -> dict[str, client.ClientReply]:
    method, frozen = world.method, world.frozen
    sent, local = stack_sent(tasks), tensors.stack([task.local_tensors for task in tasks])
    scores = measure_chunk(world, tasks, sent, local)
    batch = stack_clients(world, [task.id for task in tasks], number)
    if (fast := as_stacked(method)) is not None:
        uploads, locals_ = fast.update_many(frozen, sent, local, batch)
    else:

        def update(sent: Tensors, local: Tensors, *rows: Tensor) -> tuple[Tensors, Tensors]:
            upload, new_local = method.update(frozen, sent, local, Client(*rows))
            return upload, new_local

        uploads, locals_ = vmap(update)(sent, local, *vars(batch).values())
    replies = {}
    for i, task in enumerate(tasks):
        upload = {key: value[i] for key, value in uploads.items()}  # views: all are used, or none
        rows = len(world.members[task.id].train)
        replies[task.id] = client.ClientReply(upload, tensors.select(locals_, i), scores[i], rows)
    return replies
