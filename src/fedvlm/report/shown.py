"""What a command showed in the end, so that the same command shows it again without running."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from fedvlm import __version__
from fedvlm.errors import DataError
from fedvlm.record import Record
from fedvlm.storage.sealed import INDEX, digest_of, read_json, write_json

FILE = ".shown.json"


@dataclass(frozen=True)
class Shown:
    """An experiment whose runs are all finished."""

    runs: Sequence[str]  # folders, the bars first
    bars: int  # how many of them are
    words: Mapping[str, Any]  # how its table is made
    title: str
    sentences: Sequence[str]

    @property
    def records(self) -> list[Record]:
        return [Record(Path(one)) for one in self.runs]


def key_of(file: Path | None, asked: Mapping[str, Any]) -> str:
    """Of all that was asked: the same key, the same runs."""
    text = "" if file is None or not file.exists() else sha256(file.read_bytes()).hexdigest()
    return sha256(dumps([__version__, text, asked], sort_keys=True).encode()).hexdigest()


def remember(home: Path, key: str, shown: Shown) -> None:
    ends = [digest_of(Path(one) / INDEX) for one in shown.runs]
    write_json(home / FILE, {"key": key, "ends": ends, **asdict(shown)})


def remembered(home: Path, key: str) -> Shown | None:
    """What was shown for this key, if every record is as it was then."""
    try:
        found = read_json(home / FILE)
        ends = [digest_of(Path(one) / INDEX) for one in found["runs"]]
        if found.pop("key") != key or found.pop("ends") != ends:
            return None
        return Shown(**found)
    except (DataError, OSError, KeyError, TypeError, AttributeError):
        return None
