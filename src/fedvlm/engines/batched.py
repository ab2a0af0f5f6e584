"""Many clients at once: padded, masked and vmapped in chunks, on one or more processes.

The chunks depend on the clients alone, never on the processes or the order in which clients are
named, and every process computes with one thread: so the bits of a result are the same for any
number of workers. On a GPU they are larger, as its free memory allows when a training begins.
"""

import traceback
from collections.abc import Sequence
from math import prod
from time import perf_counter

from torch import Tensor
from torch.func import vmap

from fedvlm import tensors
from fedvlm.core import Client, Tensors, as_stacked
from fedvlm.engines.client import ClientReply, RoundReplies, Task, World
from fedvlm.engines.crowd import load_chunk, measure_chunk, stack_clients, stack_sent
from fedvlm.engines.placed import chunk_factor, device_of, with_resident_rows
from fedvlm.engines.pool import WorkerPool
from fedvlm.engines.single import adapt_client, failure, one_thread, run_client
from fedvlm.errors import FedVLMError
from fedvlm.machine import count_cores
from fedvlm.parts.bodies import adapts

CHUNK_ROW_BYTES = 8 << 20  # padded rows of a chunk
CHUNK_LOCAL_BYTES = 1 << 20  # local tensors of a chunk: large ones gain nothing from stacking
MAX_CLIENTS_PER_CHUNK = 32  # clients of a chunk
MIN_SECONDS_TO_FORK = 10.0  # seconds a run must still take for worker processes to pay for their start


class Batched:
    def __init__(self, world: World, workers: int = 0, rounds: int = 1) -> None:
        """`workers` = 0: as many processes as cores, once the first round shows that they pay."""
        self.world = with_resident_rows(world)
        self.rounds = rounds
        place = device_of(world.method)
        # a GPU works on clients side by side by itself, and cannot be used in a forked process
        self.workers = (workers or count_cores()) if place.type == "cpu" else 1
        self.forks = workers > 1 and self.workers > 1
        self.chunk_factor = chunk_factor(place, CHUNK_ROW_BYTES)
        self.pool: WorkerPool | None = None

    def round(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        parts = make_chunks(self.world, tasks, self.chunk_factor)
        self._fork(len(parts))
        if self.pool is not None:
            return RoundReplies(self.pool.round(number, parts))
        start = perf_counter()
        done: dict[str, ClientReply] = {}
        with one_thread():
            for part in parts:
                done.update(run_chunk(self.world, number, part))
        self.rounds -= 1
        self.forks = self.workers > 1 and (perf_counter() - start) * self.rounds > MIN_SECONDS_TO_FORK
        return RoundReplies(done)

    def adapt(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        parts = make_chunks(self.world, tasks, self.chunk_factor)
        if self.pool is not None:
            return RoundReplies(self.pool.round(number, parts, last=True))
        done: dict[str, ClientReply] = {}
        with one_thread():
            for part in parts:
                done.update(adapt_chunk(self.world, number, part))
        return RoundReplies(done)

    def _fork(self, parts: int) -> None:
        if self.forks and self.pool is None and parts > 1:
            self.pool = WorkerPool(self.world, min(self.workers, parts))

    def is_forked(self, tasks: Sequence[Task], last: bool) -> bool:
        """Whether these are worker processes' to do; those are never forked beside a thread."""
        if not last and self.pool is None:
            self._fork(len(make_chunks(self.world, tasks, self.chunk_factor)))
        return self.pool is not None

    def stop(self) -> None:
        """A round that another thread waits for ends without an answer."""
        if self.pool is not None:
            self.pool.is_stopped = True

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None


def make_chunks(world: World, tasks: Sequence[Task], chunk_factor: int = 1) -> list[list[Task]]:
    """Tasks grouped by size, largest first, so that little is padded and processes end together.

    `times` as much as suits the cache of a core may be together.
    """
    width = 4 * prod(world.x.shape[1:])
    out: list[list[Task]] = []
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


def have_same_shapes(a: Task, b: Task) -> bool:
    """Whether two clients were sent and hold tensors of the same names and shapes."""
    pairs = ((a.sent, b.sent), (a.local_tensors, b.local_tensors))
    return all(
        tensors_a.keys() == tensors_b.keys() and all(tensors_a[key].shape == tensors_b[key].shape for key in tensors_a)
        for tensors_a, tensors_b in pairs
    )


def run_chunk(world: World, number: int, tasks: Sequence[Task]) -> dict[str, ClientReply]:
    """One chunk; if it fails, its clients go one by one, so that the error can name the client."""
    # A tower fills a core by itself, and Adam makes much of what rounding leaves of a zero slope.
    one_by_one = "image tower" in world.method.traits.needs or not isinstance(world.x, Tensor)
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


def adapt_chunk(world: World, number: int, tasks: Sequence[Task]) -> dict[str, ClientReply]:
    """The adaptation of a chunk's clients; of a crowd without one it is all in one product."""
    world = load_chunk(world, [task.id for task in tasks])
    if not world.has_many_clients or adapts(world.method) or not isinstance(world.x, Tensor):
        return {task.id: adapt_client(world, number, task) for task in tasks}
    sent, local = stack_sent(tasks), tensors.stack([task.local_tensors for task in tasks])
    scores = measure_chunk(world, tasks, sent, local)
    return {
        task.id: ClientReply(None, task.local_tensors, scores[i], len(world.members[task.id].train))
        for i, task in enumerate(tasks)
    }


def run_stacked(world: World, number: int, tasks: Sequence[Task]) -> dict[str, ClientReply]:
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
    return {
        task.id: ClientReply(
            {key: value[i] for key, value in uploads.items()},  # all are used, or none
            tensors.select(locals_, i),
            scores[i],
            len(world.members[task.id].train),
        )
        for i, task in enumerate(tasks)
    }
