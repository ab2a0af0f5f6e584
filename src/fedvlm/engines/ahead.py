"""Clients of a large federation, one part after the other, with the next part under way meanwhile.

Worker processes would else wait for as long as the server compares, adds up and writes what came.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from fedvlm.engines.batched import Batched
from fedvlm.engines.client import RoundReplies, Task
from fedvlm.engines.single import one_thread


class RoundRunner(Protocol):
    """What an engine does with the clients of a part."""

    def round(self, number: int, tasks: Sequence[Task]) -> RoundReplies: ...
    def adapt(self, number: int, tasks: Sequence[Task]) -> RoundReplies: ...


FinishedPart = tuple[Sequence[Task], RoundReplies]


def run_parts(
    engine: RoundRunner, number: int, parts: Iterable[Sequence[Task]], last: bool = False
) -> Iterator[FinishedPart]:
    """The tasks of each part with what came of them: a round, or with `last` the adaptation.

    Whoever takes them does so with one thread, for the cores are the workers'.
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
                    yield _await_part(ready)
                    del ready
            if running is not None:
                ready, running = running, None
                yield _await_part(ready)
        finally:
            if running is not None and batched is not None:  # nobody is to wait for it
                batched.stop()


def _await_part(ready: "tuple[Sequence[Task], Future[RoundReplies]]") -> FinishedPart:
    return ready[0], ready[1].result()
