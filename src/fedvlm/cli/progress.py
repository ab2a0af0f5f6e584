"""Progress with an ETA on a terminal, and nothing elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar with an ETA for whatever takes more than two seconds; silent if nobody watches."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
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
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=False)
    tasks: dict[str, Any] = {}
    begins: dict[str, tuple[float, int]] = {}

    def report(what: str, done: int, total: int) -> None:
        now = monotonic()
        begin, first = begins.setdefault(what, (now, done))
        if now - begin < 2:
            return
        if not bar.live.is_started:
            bar.start()
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total, rate="")
        rate = f"{(done - first) / (now - begin):.1f}/s"
        bar.update(tasks[what], completed=done, total=total, rate=rate)

    try:
        yield report
    finally:
        bar.stop()
