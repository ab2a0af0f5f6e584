"""Show progress: a bar on a terminal, a line per 10 % elsewhere, nothing for short tasks."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any

from fedvlm.cli.options import is_quiet

QUIET_SECONDS = 4.0  # seconds without any progress display
TENTHS = 10
UNITS = {"embedding": "images", "predicting": "images", "comparing": "images"}


class ProgressDisplay(ABC):
    """Show a task's progress when called with its name, the number done and the total."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self.starts: dict[str, tuple[float, int]] = {}
        self.last: dict[str, int] = {}
        self.status: dict[str, str] = {}  # of each method, by its latest training
        self.tenths: dict[str, int] = {}  # that are printed as lines

    def __call__(self, task: str, done: int, total: int) -> None:
        now = self.clock()
        if done < self.last.get(task, done + 1):  # the first, or another run of the same name
            self.starts[task] = now, done
            self.status.pop(task, None)
            self.tenths[task] = 0
        self.last[task] = done
        started, first = self.starts[task]
        if now - started >= QUIET_SECONDS and done > first:
            self.show(task, done, total, now - started, done - first)

    def update_status(self, task: str, line: Mapping[str, Any]) -> None:
        """Note training, round and validation accuracy from a line of a method's record."""
        accuracy = line.get("validation")
        so_far = "" if accuracy is None else f", {100 * accuracy:.1f} % validation accuracy"
        self.status[task] = f"training {line['training']}, round {line['round'] + 1}{so_far}"

    def title(self, task: str) -> str:
        return task if task not in self.status else f"{task}: {self.status[task]}"

    @abstractmethod
    def show(self, task: str, done: int, total: int, elapsed: float, n_new: int) -> None: ...


def rate(task: str, n_new: int, elapsed: float) -> str:
    return f"{n_new / elapsed:.1f} {UNITS.get(task, '')}".rstrip() + "/s"


class ProgressLines(ProgressDisplay):
    """Print lines, for a file or a pipe."""

    def __init__(self, write_line: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        super().__init__(clock)
        self.write_line = write_line

    def show(self, task: str, done: int, total: int, elapsed: float, n_new: int) -> None:
        tenth = TENTHS * done // total if total else TENTHS
        if tenth <= self.tenths[task]:
            return
        self.tenths[task] = tenth
        remaining = elapsed / n_new * (total - done)
        times = f"{clock_time(elapsed)} elapsed, {clock_time(remaining)} left"
        self.write_line(f"{self.title(task)}: {done} of {total}, {times}, {rate(task, n_new, elapsed)}")


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


class ProgressBars(ProgressDisplay):
    """Draw bars, for a terminal."""

    def __init__(self, bar: Any, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(clock)
        self.bar, self.tasks = bar, dict[str, Any]()

    def show(self, task: str, done: int, total: int, elapsed: float, n_new: int) -> None:
        if not self.bar.live.is_started:
            self.bar.start()
        title = self.title(task)
        if task not in self.tasks:
            self.tasks[task] = self.bar.add_task(title, total=total, rate="")
        self.bar.update(
            self.tasks[task], completed=done, total=total, description=title, rate=rate(task, n_new, elapsed)
        )


@contextmanager
def progress() -> Iterator[ProgressDisplay]:
    """Yield the display that suits stderr and --quiet."""
    if is_quiet():
        yield ProgressLines(lambda text: None)
        return
    if not sys.stderr.isatty():
        yield ProgressLines(lambda text: print(text, file=sys.stderr, flush=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    title = TextColumn("{task.description}", markup=False)  # a client's name may have brackets
    columns = (title, BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=False)
    try:
        yield ProgressBars(bar)
    finally:
        bar.stop()
