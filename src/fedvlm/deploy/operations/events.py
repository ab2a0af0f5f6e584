"""Log what a server or a site is doing, as JSON lines in its folder.

A log line is never needed to continue: one that cannot be written is skipped.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedvlm.deploy.operations.webhook import Webhook

LOG_FILE, ROTATED_LOG_FILE = "events.jsonl", "events.1.jsonl"
MAX_LOG_BYTES = 4 << 20  # bytes of a log file before it is rotated
MAX_VALUE_CHARS = 500  # characters of a word in a line
Event = dict[str, Any]
EventLogger = Callable[..., None]  # kind and facts


def ignore_event(kind: str, **facts: Any) -> None:
    """Ignore an event, where nobody keeps a log."""


EVENT_MESSAGES: Mapping[str, str] = {
    # at a server
    "up": "the server is up at {address} for {sites}",
    "down": "the server is stopped",
    "begun": "{method}, {training}: {rounds} rounds over {sites}",
    "waiting": "waiting for {sites}, {left} s more",
    "connected": "{site} is connected: {samples} training samples",
    "notice": "{site} {text}",
    "measured": "{site} has measured {classifiers}",
    "refused": "{site} does not take part: {why}",
    "round": "round {round} of {rounds}: {answered} of {asked} sites{accuracy}, {kB} kB, {seconds} s",
    "withdrew": "{site} has withdrawn; its contribution was removed from {out} of {of} trainings",
    "joined": "{site} has joined after the last round: {samples} training samples",
    "missing": "round {round}: {site} is missing: {why}",
    "ended": "the run is finished; its record is in {record}",
    "failed": "the run ended: {why}",
    # at a site
    "connecting": "site {site} is connecting to {address}; its certificate {until}; stop it with Ctrl-C",
    "unreachable": "{why}; retrying every second",
    "reached": "the server is up; waiting for a run",
    "asks": "the server asks for {method}, {rounds} rounds, and a person has to consent: fedvlm deploy consent",
    "opened": "{method}: opened a training with {samples} training and {validation} validation samples of {classes} "
    "classes",
    "sent": "{what}: {bytes} bytes left this site ({fields})",
    "withdrawn": "{by} has withdrawn this site; it no longer answers requests",
    "said": "{text}",
    "consent": "{by} has answered the request for plan {plan}: {answer}",
    "gained": "{federated} of {samples} correct with the federation, {alone} of {samples} alone: {advice}",
    "classifier": "the classifier is in {place}",
}


class EventLog:
    """Append events to the log and announce some by webhook; `print_line` gets each as a sentence with the time."""

    def __init__(self, folder: Path, print_line: Callable[[str], None] | None = None) -> None:
        self.folder, self.print_line, self.webhook = folder, print_line, Webhook(folder)

    def __call__(self, kind: str, **facts: Any) -> None:
        event = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "kind": kind, **facts}
        with suppress(OSError):
            append_line(self.folder / LOG_FILE, event)
        if self.print_line is not None:
            self.print_line(format_event(event))
        self.webhook.announce(event)


def append_line(path: Path, line: Mapping[str, Any], rotated_files: int = 1) -> None:
    """Append a JSON line; a full file becomes NAME.1.jsonl, and older ones move up to NAME.N.jsonl."""
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        old = [path, *(path.with_suffix(f".{number}{path.suffix}") for number in range(1, rotated_files + 1))]
        for newer, older in reversed(list(pairwise(old))):
            with suppress(FileNotFoundError):
                os.replace(newer, older)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
        file.write(json.dumps(line, ensure_ascii=False, default=str).encode() + b"\n")


def format_event(event: Event) -> str:
    """Return an event as a sentence with the local time."""
    at = datetime.fromisoformat(event["time"]).astimezone().strftime("%H:%M:%S")
    facts = {key: printable(value) for key, value in event.items()}
    text = EVENT_MESSAGES.get(event["kind"], "{kind}")
    return f"{at} {text.format_map(_DefaultFacts(facts))}"


def format_gain(event: Event) -> str:
    """Return whether a site gained, and when."""
    return f"{format_event(event).partition(' ')[2]} (validation samples, {event['time'][:10]})"


class _DefaultFacts(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "?"


def printable(value: Any, limit: int = MAX_VALUE_CHARS) -> str:
    """Return a value as one printable line of limited length."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    plain = "".join(char if char.isprintable() else " " for char in text)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def read_events(folder: Path) -> list[Event]:
    """Return all events, those of the rotated file first; an incomplete line is skipped."""
    paths = [path for path in (folder / ROTATED_LOG_FILE, folder / LOG_FILE) if path.exists()]
    return [event for path in paths for event in _lines(path.read_bytes())]


def _lines(data: bytes) -> Iterator[Event]:
    for text in data.split(b"\n"):
        with suppress(ValueError):
            event = json.loads(text)
            if isinstance(event, dict) and {"time", "kind"} <= event.keys():
                yield event


class EventTail:
    """Read the events since the last call, also across a rotation."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG_FILE
        exists = self.path.exists()
        self.offset = self.path.stat().st_size if exists else 0
        self.inode = self._read_inode() if exists else 0

    def _read_inode(self) -> int:
        return self.path.stat().st_ino

    def read_new(self) -> list[Event]:
        if not self.path.exists():
            return []
        if self.inode != self._read_inode():
            self.offset, self.inode = 0, self._read_inode()
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read()
        complete_lines = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete_lines)
        return list(_lines(complete_lines))


def format_percent(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{100 * accuracy:.1f} %"


def validation_accuracy(scores: Mapping[str, Any]) -> float | None:
    """Return the accuracy on a client's validation samples, if it has told."""
    samples = scores.get("validation_rows")
    return scores["validation_hits"] / samples if samples else None


def round_logger(log_event: EventLogger, rounds: int) -> Callable[[str, Any], None]:
    """Return a listener of a record that logs each round and who was missing in it."""

    def listen(run: str, line: Mapping[str, Any]) -> None:
        clients, missing = line["clients"], line.get("missing", {})
        moved = sum(traffic["bytes_up"] + traffic["bytes_down"] for traffic in clients.values())
        accuracy = line.get("accuracy")
        for site, reason in missing.items():
            log_event("missing", round=line["round"] + 1, site=site, why=reason)
        log_event(
            "round",
            round=line["round"] + 1,
            rounds=rounds,
            answered=len(clients),
            asked=len(clients) + len(missing),
            there=sorted(clients),
            share=accuracy,
            results={site: validation_accuracy(scores) for site, scores in clients.items()},
            accuracy=f", accuracy so far {format_percent(accuracy)}" if accuracy is not None else "",
            kB=round(moved / 1000, 1),
            seconds=round(line["seconds"], 1),
        )

    return listen
