"""The batched engine: clients are padded, masked and vmapped in chunks, on one or more processes.

The chunks depend on the clients alone, never on the processes or the order in which clients are
named, and every process computes with one thread: so the bits of a result are the same for any
number of workers. On a GPU they are larger, as its free memory allows when a training begins.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

from fedvlm.engines.chunks import CHUNK_ROW_BYTES, adapt_chunk, make_chunks, run_chunk
from fedvlm.engines.client import Engine, RoundReplies, Task, World
from fedvlm.engines.placement import chunk_factor, device_of, with_resident_rows
from fedvlm.engines.sequential import one_thread
from fedvlm.engines.workers import WorkerPool
from fedvlm.machine import count_cores

MIN_SECONDS_TO_FORK = 10.0  # seconds a run must still take for worker processes to pay for their start


class Batched:
    def __init__(self, world: World, workers: int = 0, rounds: int = 1) -> None:
        """Open the engine; `workers` = 0: one process per core, if the first round shows that they pay."""
        self.world = with_resident_rows(world)
        self.rounds = rounds
        place = device_of(world.method)
        # a GPU runs clients in parallel by itself, and cannot be used in a forked process
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
        with one_thread():
            done = [run_chunk(self.world, number, part) for part in parts]
        self.rounds -= 1
        self.forks = self.workers > 1 and (perf_counter() - start) * self.rounds > MIN_SECONDS_TO_FORK
        return RoundReplies({id: reply for replies in done for id, reply in replies.items()})

    def adapt(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        parts = make_chunks(self.world, tasks, self.chunk_factor)
        if self.pool is not None:
            return RoundReplies(self.pool.round(number, parts, last=True))
        with one_thread():
            done = [adapt_chunk(self.world, number, part) for part in parts]
        return RoundReplies({id: reply for replies in done for id, reply in replies.items()})

    def _fork(self, parts: int) -> None:
        if self.forks and self.pool is None and parts > 1:
            self.pool = WorkerPool(self.world, min(self.workers, parts))

    def is_forked(self, tasks: Sequence[Task], last: bool) -> bool:
        """Tell whether worker processes run these tasks; they are never forked while another thread runs."""
        if not last and self.pool is None:
            self._fork(len(make_chunks(self.world, tasks, self.chunk_factor)))
        return self.pool is not None

    def stop(self) -> None:
        """End a round that another thread waits for, without replies."""
        if self.pool is not None:
            self.pool.is_stopped = True

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None


FinishedPart = tuple[Sequence[Task], RoundReplies]


def run_parts(
    engine: Engine, number: int, parts: Iterable[Sequence[Task]], last: bool = False
) -> Iterator[FinishedPart]:
    """Yield the tasks of each part with their replies: of a round, or with `last` of the adaptation.

    The next part runs in the workers while the caller handles the last one, with one thread: the cores are theirs.
    """
    run_part = engine.adapt if last else engine.round
    batched = engine if isinstance(engine, Batched) else None
    with one_thread(), ThreadPoolExecutor(1) as executor:
        running: tuple[Sequence[Task], Future[RoundReplies]] | None = None
        try:
            for tasks in parts:
                if batched is None or not batched.is_forked(tasks, last):
                    yield tasks, run_part(number, tasks)
                    continue
                ready, running = running, (tasks, executor.submit(run_part, number, tasks))
                del tasks
                if ready is not None:
                    yield ready[0], ready[1].result()
                    del ready
            if running is not None:
                ready, running = running, None
                yield ready[0], ready[1].result()
        finally:
            if running is not None and batched is not None:  # the caller has failed and does not wait for it
                batched.stop()
