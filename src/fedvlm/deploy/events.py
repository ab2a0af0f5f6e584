"""What a server or a site is doing, as lines in its folder that terminals and `status` read.

A line is never needed to go on: one that cannot be written is left out.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NAME, OLD = "events.jsonl", "events.1.jsonl"
MOST = 4 << 20  # bytes of the file before it becomes the old one
LONG = 500  # characters of a word in a line
Event = dict[str, Any]
Note = Callable[..., None]  # kind and facts


def unnoted(kind: str, **facts: Any) -> None:
    """Where nobody keeps a log."""


SENTENCES: Mapping[str, str] = {
    # at a server
    "up": "the server is up at {address} for {sites}",
    "down": "the server is stopped",
    "begun": "{method}, {training}: {rounds} rounds over {sites}",
    "waiting": "waiting for {sites}, {left} s more",
    "connected": "{site} is connected: {rows} training rows",
    "refused": "{site} takes no part: {why}",
    "round": "round {round} of {rounds}: {answered} of {asked} sites{accuracy}, {kB} kB, "
    "{seconds} s",
    "withdrew": "{site} has withdrawn; its contribution is out of {out} of {of} trainings",
    "joined": "{site} has joined after the last round: {rows} training rows",
    "missing": "round {round}: {site} is missing: {why}",
    "ended": "the run is finished; its record is in {record}",
    "failed": "the run ended: {why}",
    # at a site
    "connecting": "site {site} is connecting to {address}; its certificate {until}; "
    "stop it with Ctrl-C",
    "unreachable": "{why}; trying again every second",
    "reached": "the server answers; waiting for a run",
    "asks": "the server asks for {method}, {rounds} rounds, and a person has to consent: "
    "fedvlm deploy consent",
    "opened": "{method}: a training over {rows} training rows, {validation} validation rows and "
    "{classes} classes of this site",
    "sent": "{what}: {bytes} bytes left this site ({fields})",
    "withdrawn": "{by} has withdrawn this site; it answers no more",
    "said": "{text}",
    "gained": "on its {rows} validation rows: {federated} right with the federation, {alone} by "
    "this site's rows alone",
    "classifier": "its classifier is in {place}",
}


class Events:
    """Appends lines; `say` gets each as a sentence with the time."""

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        self.folder, self.say = folder, say

    def __call__(self, kind: str, **facts: Any) -> None:
        event = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "kind": kind, **facts}
        with suppress(OSError):
            _append(self.folder / NAME, json.dumps(event, ensure_ascii=False, default=str))
        if self.say is not None:
            self.say(sentence(event))


def _append(path: Path, line: str) -> None:
    if path.exists() and path.stat().st_size > MOST:
        os.replace(path, path.with_name(OLD))
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
        file.write(line.encode() + b"\n")


def sentence(event: Event) -> str:
    """A line for people: the local time, and what happened."""
    at = datetime.fromisoformat(event["time"]).astimezone().strftime("%H:%M:%S")
    facts = {key: _word(value) for key, value in event.items()}
    text = SENTENCES.get(event["kind"], "{kind}")
    return f"{at} {text.format_map(_Known(facts))}"


class _Known(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "?"


def _word(value: Any) -> str:
    """Words of others are shown as one line, of no more than some length and no odd signs."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    plain = "".join(one if one.isprintable() else " " for one in text)
    return plain if len(plain) <= LONG else plain[:LONG] + "…"


def read(folder: Path) -> list[Event]:
    """All lines that are there, the old file's first; a torn one is left out."""
    there = [path for path in (folder / OLD, folder / NAME) if path.exists()]
    return [event for path in there for event in _lines(path.read_bytes())]


def _lines(data: bytes) -> Iterator[Event]:
    for text in data.split(b"\n"):
        with suppress(ValueError):
            event = json.loads(text)
            if isinstance(event, dict) and {"time", "kind"} <= event.keys():
                yield event


class Tail:
    """What has come since the last look, also over a change of files."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        there = self.path.exists()
        self.at = self.path.stat().st_size if there else 0
        self.file = self._number() if there else 0

    def _number(self) -> int:
        return self.path.stat().st_ino

    def new(self) -> list[Event]:
        if not self.path.exists():
            return []
        if self.file != self._number():
            self.at, self.file = 0, self._number()
        with open(self.path, "rb") as file:
            file.seek(self.at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.at += len(whole)
        return list(_lines(whole))


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
