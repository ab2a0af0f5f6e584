"""How far a run is: a bar on a terminal, a line per tenth elsewhere, nothing for short runs."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any

SHORT = 4.0  # seconds that nobody needs to be told of
TENTHS = 10
UNITS = {"embedding": "images", "predicting": "images", "comparing": "images"}


class Watch(ABC):
    """Called with what is going on, how much is done and of how much."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self.begins: dict[str, tuple[float, int]] = {}
        self.last: dict[str, int] = {}
        self.said: dict[str, str] = {}  # by the training that was heard last, of each method

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self.clock()
        if done < self.last.get(what, done + 1):  # the first, or another run of the same name
            self.begins[what] = now, done
            self.said.pop(what, None)
            self.fresh(what)
        self.last[what] = done
        begin, first = self.begins[what]
        if now - begin >= SHORT and done > first:
            self.show(what, done, total, now - begin, done - first)

    def hear(self, what: str, line: Mapping[str, Any]) -> None:
        """A line of a method's record: its training, its round, and its accuracy before it."""
        share = line.get("validation")
        so_far = "" if share is None else f", {100 * share:.1f} % of validation rows"
        self.said[what] = f"training {line['training']}, round {line['round'] + 1}{so_far}"

    def fresh(self, what: str) -> None:  # noqa: B027 - a bar need not know
        """Something begins."""

    def title(self, what: str) -> str:
        return what if what not in self.said else f"{what}: {self.said[what]}"

    @abstractmethod
    def show(self, what: str, done: int, total: int, elapsed: float, fresh: int) -> None: ...


def rate(what: str, fresh: int, elapsed: float) -> str:
    return f"{fresh / elapsed:.1f} {UNITS.get(what, '')}".rstrip() + "/s"


class Lines(Watch):
    """For a file or a pipe."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        super().__init__(clock)
        self.say = say
        self.tenths: dict[str, int] = {}

    def fresh(self, what: str) -> None:
        self.tenths[what] = 0

    def show(self, what: str, done: int, total: int, elapsed: float, fresh: int) -> None:
        tenth = TENTHS * done // total if total else TENTHS
        if tenth <= self.tenths[what]:
            return
        self.tenths[what] = tenth
        left = elapsed / fresh * (total - done)
        self.say(
            f"{self.title(what)}: {done} of {total}, {clock_time(elapsed)} elapsed, "
            f"{clock_time(left)} left, {rate(what, fresh, elapsed)}"
        )


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


class Bars(Watch):
    """For a terminal."""

    def __init__(self, bar: Any, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(clock)
        self.bar, self.tasks = bar, dict[str, Any]()

    def show(self, what: str, done: int, total: int, elapsed: float, fresh: int) -> None:
        if not self.bar.live.is_started:
            self.bar.start()
        title = self.title(what)
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(title, total=total, rate="")
        self.bar.update(
            self.tasks[what],
            completed=done,
            total=total,
            description=title,
            rate=rate(what, fresh, elapsed),
        )


@contextmanager
def progress() -> Iterator[Watch]:
    """What a long run reports to; `hear` takes the lines of its record besides."""
    if not sys.stderr.isatty():
        yield Lines(lambda text: print(text, file=sys.stderr, flush=True))
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),  # a client's name may have brackets
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=False)
    try:
        yield Bars(bar)
    finally:
        bar.stop()
