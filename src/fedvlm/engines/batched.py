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
from fedvlm.core import Client, Tensors, stacked
from fedvlm.engines.client import Answers, Done, Task, World
from fedvlm.engines.crowd import crowd, measured, near, sent_to_all
from fedvlm.engines.placed import larger, place_of, resident
from fedvlm.engines.pool import Pool
from fedvlm.engines.single import failure, last, one, one_thread
from fedvlm.errors import FedVLMError
from fedvlm.machine import cores
from fedvlm.parts.bodies import adapts

ROW_BYTES = 8 << 20  # padded rows of a chunk
LOCAL_BYTES = 1 << 20  # local tensors of a chunk: large ones gain nothing from stacking
MOST = 32  # clients of a chunk
WORTH = 10.0  # seconds a run must still take for worker processes to pay for their start


class Batched:
    def __init__(self, world: World, workers: int = 0, rounds: int = 1) -> None:
        """`workers` = 0: as many processes as cores, once the first round shows that they pay."""
        self.world = resident(world)
        self.rounds = rounds
        place = place_of(world.method)
        # a GPU works on clients side by side by itself, and cannot be used in a forked process
        self.workers = (workers or cores()) if place.type == "cpu" else 1
        self.eager = workers > 1 and self.workers > 1
        self.times = larger(place, ROW_BYTES)
        self.pool: Pool | None = None

    def round(self, number: int, tasks: Sequence[Task]) -> Answers:
        parts = chunks(self.world, tasks, self.times)
        self._fork(len(parts))
        if self.pool is not None:
            return Answers(self.pool.round(number, parts))
        start = perf_counter()
        done: dict[str, Done] = {}
        with one_thread():
            for part in parts:
                done.update(run_chunk(self.world, number, part))
        self.rounds -= 1
        self.eager = self.workers > 1 and (perf_counter() - start) * self.rounds > WORTH
        return Answers(done)

    def adapt(self, number: int, tasks: Sequence[Task]) -> Answers:
        parts = chunks(self.world, tasks, self.times)
        if self.pool is not None:
            return Answers(self.pool.round(number, parts, last=True))
        done: dict[str, Done] = {}
        with one_thread():
            for part in parts:
                done.update(last_chunk(self.world, number, part))
        return Answers(done)

    def _fork(self, parts: int) -> None:
        if self.eager and self.pool is None and parts > 1:
            self.pool = Pool(self.world, min(self.workers, parts))

    def forked(self, tasks: Sequence[Task], last: bool) -> bool:
        """Whether these are worker processes' to do; those are never forked beside a thread."""
        if not last and self.pool is None:
            self._fork(len(chunks(self.world, tasks, self.times)))
        return self.pool is not None

    def stop(self) -> None:
        """A round that another thread waits for ends without an answer."""
        if self.pool is not None:
            self.pool.stopped = True

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None


def chunks(world: World, tasks: Sequence[Task], times: int = 1) -> list[list[Task]]:
    """Tasks grouped by size, largest first, so that little is padded and processes end together.

    `times` as much as suits the cache of a core may be together.
    """
    width = 4 * prod(world.x.shape[1:])
    out: list[list[Task]] = []
    longest = taken = 0
    count = {task.id: len(world.members[task.id].train) for task in tasks}
    for task in sorted(tasks, key=lambda t: (not t.trains, -count[t.id], t.id)):
        rows = max(1, count[task.id])
        local = tensors.count_bytes(task.own)
        fits = (
            bool(out)
            and out[-1][0].trains == task.trains
            and alike(out[-1][0], task)
            and len(out[-1]) < times * MOST
            and (len(out[-1]) + 1) * longest * width <= times * ROW_BYTES
            and taken + local <= times * LOCAL_BYTES
        )
        if fits:
            out[-1].append(task)
            taken += local
        else:
            out.append([task])
            longest, taken = rows, local
    return out


def alike(a: Task, b: Task) -> bool:
    """Whether two clients were sent and hold tensors of the same names and shapes."""
    pairs = ((a.sent, b.sent), (a.own, b.own))
    return all(
        one.keys() == other.keys() and all(one[key].shape == other[key].shape for key in one)
        for one, other in pairs
    )


def run_chunk(world: World, number: int, tasks: Sequence[Task]) -> dict[str, Done]:
    """One chunk; if it fails, its clients go one by one, so that the error can name the client."""
    # A tower fills a core by itself, and Adam makes much of what rounding leaves of a zero slope.
    alone = "image tower" in world.method.traits.needs or not isinstance(world.x, Tensor)
    world = near(world, [task.id for task in tasks])
    if not tasks[0].trains or alone:
        return {task.id: one(world, number, task) for task in tasks}
    try:
        return together(world, number, tasks)
    except FedVLMError:
        raise
    except Exception as error:
        for task in tasks:
            one(world, number, task)
        ids = [task.id for task in tasks]
        raise failure(world, number, ids, traceback.format_exc()) from error


def last_chunk(world: World, number: int, tasks: Sequence[Task]) -> dict[str, Done]:
    """The adaptation of a chunk's clients; of a crowd without one it is all in one product."""
    world = near(world, [task.id for task in tasks])
    if not world.crowded or adapts(world.method) or not isinstance(world.x, Tensor):
        return {task.id: last(world, number, task) for task in tasks}
    sent, local = sent_to_all(tasks), tensors.stack([task.own for task in tasks])
    scores = measured(world, tasks, sent, local)
    return {
        task.id: Done(None, task.own, scores[i], len(world.members[task.id].train))
        for i, task in enumerate(tasks)
    }


def together(world: World, number: int, tasks: Sequence[Task]) -> dict[str, Done]:
    method, frozen = world.method, world.frozen
    sent, local = sent_to_all(tasks), tensors.stack([task.own for task in tasks])
    scores = measured(world, tasks, sent, local)
    batch = crowd(world, [task.id for task in tasks], number)
    if (fast := stacked(method)) is not None:
        uploads, locals_ = fast.update_many(frozen, sent, local, batch)
    else:

        def update(sent: Tensors, local: Tensors, *rows: Tensor) -> tuple[Tensors, Tensors]:
            upload, own = method.update(frozen, sent, local, Client(*rows))
            return upload, own

        uploads, locals_ = vmap(update)(sent, local, *vars(batch).values())
    return {
        task.id: Done(
            {key: value[i] for key, value in uploads.items()},  # all are used, or none
            tensors.select(locals_, i),
            scores[i],
            len(world.members[task.id].train),
        )
        for i, task in enumerate(tasks)
    }
