"""What left a site and what came in: one line per message, each bound to the one before it.

A line holds names, shapes, bytes and a hash, never a value. Lines are only ever appended, and each
carries the hash of the line before, so a line that was changed, moved or taken out is found. Who
can write to the file can also write it all anew, or cut its end off: only a head (the hash of the
last line) that is kept elsewhere shows that.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Literal

from fedvlm.errors import DataError
from fedvlm.storage.files import open_for_append

LEDGER_FILE = "ledger.jsonl"
FIRST_HASH = "0" * 64  # what the first line says of the line before it
Direction = Literal["in", "out", "refused", "dropped"]


@dataclass(frozen=True)
class History:
    """A ledger as it was read: its sound lines, and what a crash or a hand has done to others."""

    lines: tuple[dict[str, Any], ...]
    torn: tuple[int, ...]  # numbers of lines that a crash cut short; nothing was sent for them
    broken: tuple[str, ...]  # what does not fit, line by line
    head: str  # the hash of the last line

    def contains(self, head: str) -> bool:
        """Whether a head that was noted before is still in the ledger."""
        return bool(head) and any(line["hash"].startswith(head) for line in self.lines)


class Ledger:
    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LEDGER_FILE

    def add(
        self,
        direction: Direction,
        round: int,
        tensors: Mapping[str, Any] | None = None,
        data: bytes = b"",
        **about: str | int | float | None,
    ) -> str:
        """Appends a line and returns its hash; call it before a message leaves.

        `data` is the message as it travels and `tensors` what it holds. `about` is anything else
        worth keeping: the run, the method, the reason of a refusal.
        """
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "direction": direction,
            "round": round,
            "fields": {
                key: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
                for key, value in (tensors or {}).items()
            },
            "bytes": len(data),
            "content": sha256(data).hexdigest(),
            **about,
        }
        with self._locked() as file:
            before, ended = _read_last_hash(file)
            line["before"] = before
            text = json.dumps(line | {"hash": _hash_line(line)}, ensure_ascii=False)
            # A line that a crash cut short stays, ended, so that nothing is ever taken away.
            file.write((("" if ended else "\n") + text + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        return _hash_line(line)

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """The file, open for appending by this process alone; others wait their turn."""
        with open_for_append(self.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def read(self) -> History:
        """All lines, each checked against the one before it."""
        if not self.path.is_file():
            raise DataError(f"there is no {self.path}; a site's folder has one after its first round")
        lines: list[dict[str, Any]] = []
        torn, broken = [], []
        head = FIRST_HASH
        for number, text in enumerate(_read_lines(self.path), start=1):
            line = _parse_line(text)
            if line is None:
                torn.append(number)
                continue
            if line["before"] != head:
                broken.append(f"line {number} does not follow the line before it")
            if line["hash"] != _hash_line({k: v for k, v in line.items() if k != "hash"}):
                broken.append(f"line {number} was changed after it was written")
            lines.append(line)
            head = line["hash"]
        return History(tuple(lines), tuple(torn), tuple(broken), head)


def _read_lines(path: Path) -> list[bytes]:
    texts = path.read_bytes().split(b"\n")
    return texts[:-1] if texts[-1] == b"" else texts


def _parse_line(text: bytes) -> dict[str, Any] | None:
    """None for a line that is no whole line: a crash cut it short before its message left."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"before", "hash"} <= line.keys() else None


def _read_last_hash(file: IO[bytes]) -> tuple[str, bool]:
    """The hash of the last whole line, and whether the file ends with the end of a line."""
    size = file.seek(0, os.SEEK_END)
    span = 1 << 14  # read from the end, because a ledger grows for years
    while True:
        file.seek(max(0, size - span))
        texts = file.read().split(b"\n")
        ended = texts[-1] == b""
        if span < size:  # the first piece may lack its beginning
            texts = texts[1:]
        for text in reversed(texts):
            if line := _parse_line(text):
                return str(line["hash"]), ended
        if span >= size:
            return FIRST_HASH, ended
        span *= 4


def _hash_line(line: Mapping[str, Any]) -> str:
    return sha256(json.dumps(line, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
