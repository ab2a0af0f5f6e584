"""Log what matters for security as JSON lines with a fixed schema (docs/how-to/operate.md), in files that rotate."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Literal

from fedvlm.deploy.operations.events import append_line, printable

SECURITY_LOG_FILE = "security.jsonl"  # in the folder of a server or a site
SCHEMA = 1
ROTATED_FILES = 4  # kept beside the present one, 4 MB each
REPEAT_SECONDS = 60.0  # repeated refusals are one line in this time, with their number
MAX_SOURCES = 1000  # that are counted apart; an outsider cannot fill the memory
MAX_CHARS = 300  # of a value
Outcome = Literal["allowed", "refused"]


def log_security(folder: Path, event: str, outcome: Outcome, count: int = 1, **facts: str) -> None:
    """Append a line: `facts` are actor (a person or site), source (an address), target and reason."""
    line = {
        "schema": SCHEMA,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "event": event,
        "outcome": outcome,
        **{name: printable(facts.get(name, ""), MAX_CHARS) for name in ("actor", "source", "target", "reason")},
        "count": count,
    }
    with suppress(OSError):  # what it tells of has happened; a full disk does not undo it
        append_line(folder / SECURITY_LOG_FILE, line, ROTATED_FILES)


class RefusalLog:
    """Log refused calls of outsiders, at most one line a minute for each kind of call and source."""

    def __init__(self, folder: Path, clock: Callable[[], float] = monotonic) -> None:
        self.folder, self.clock = folder, clock
        self.pending: dict[tuple[str, str, str], int] = {}
        self.logged: dict[tuple[str, str, str], float] = {}

    def __call__(self, source: str, target: str, reason: str) -> None:
        key, now = (source, target, reason), self.clock()
        if key not in self.logged and len(self.logged) >= MAX_SOURCES:
            self.logged = {old: when for old, when in self.logged.items() if now - when < REPEAT_SECONDS}
            key = key if len(self.logged) < MAX_SOURCES else ("many", "many", reason)
        self.pending[key] = self.pending.get(key, 0) + 1
        if now - self.logged.get(key, -REPEAT_SECONDS) >= REPEAT_SECONDS:
            self.logged[key] = now
            facts = {"source": key[0], "target": key[1], "reason": reason}
            log_security(self.folder, "call", "refused", self.pending.pop(key), **facts)
