"""Clients of a large federation, one part after the other, with the next part under way meanwhile.

Worker processes would else wait for as long as the server compares, adds up and writes what came.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from fedvlm.engines.batched import Batched
from fedvlm.engines.client import Answers, Task
from fedvlm.engines.single import one_thread


class Asked(Protocol):
    """What an engine does with the clients of a part."""

    def round(self, number: int, tasks: Sequence[Task]) -> Answers: ...
    def adapt(self, number: int, tasks: Sequence[Task]) -> Answers: ...


Turn = tuple[Sequence[Task], Answers]


def in_turn(
    engine: Asked, number: int, parts: Iterable[Sequence[Task]], last: bool = False
) -> Iterator[Turn]:
    """The tasks of each part with what came of them: a round, or with `last` the adaptation.

    Whoever takes them does so with one thread, for the cores are the workers'.
    """
    ask = engine.adapt if last else engine.round
    apart = engine if isinstance(engine, Batched) else None
    with one_thread(), ThreadPoolExecutor(1) as beside:
        coming: tuple[Sequence[Task], Future[Answers]] | None = None
        try:
            for tasks in parts:
                if apart is None or not apart.forked(tasks, last):
                    yield tasks, ask(number, tasks)
                    continue
                ready, coming = coming, (tasks, beside.submit(ask, number, tasks))
                del tasks
                if ready is not None:
                    yield _came(ready)
                    del ready
            if coming is not None:
                ready, coming = coming, None
                yield _came(ready)
        finally:
            if coming is not None and apart is not None:  # nobody is to wait for it
                apart.stop()


def _came(ready: "tuple[Sequence[Task], Future[Answers]]") -> Turn:
    return ready[0], ready[1].result()
