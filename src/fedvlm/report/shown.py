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
from fedvlm.storage.sealed import INDEX_FILE, file_sha256, read_json, write_json

CACHE_FILE = ".shown.json"


@dataclass(frozen=True)
class FinishedExperiment:
    """An experiment whose runs are all finished."""

    runs: Sequence[str]  # folders, the bars first
    n_baselines: int  # how many of them are
    table_options: Mapping[str, Any]  # how its table is made
    title: str
    sentences: Sequence[str]

    @property
    def records(self) -> list[Record]:
        return [Record(Path(path)) for path in self.runs]


def key_of(file: Path | None, arguments: Mapping[str, Any]) -> str:
    """Of all that was asked: the same key, the same runs."""
    text = "" if file is None or not file.exists() else sha256(file.read_bytes()).hexdigest()
    return sha256(dumps([__version__, text, arguments], sort_keys=True).encode()).hexdigest()


def store_experiment(home: Path, key: str, experiment: FinishedExperiment) -> None:
    ends = [file_sha256(Path(run_path) / INDEX_FILE) for run_path in experiment.runs]
    write_json(home / CACHE_FILE, {"key": key, "ends": ends, **asdict(experiment)})


def load_experiment(home: Path, key: str) -> FinishedExperiment | None:
    """What was shown for this key, if every record is as it was then."""
    try:
        stored = read_json(home / CACHE_FILE)
        ends = [file_sha256(Path(run_path) / INDEX_FILE) for run_path in stored["runs"]]
        if stored.pop("key") != key or stored.pop("ends") != ends:
            return None
        return FinishedExperiment(**stored)
    except (DataError, OSError, KeyError, TypeError, AttributeError):
        return None
