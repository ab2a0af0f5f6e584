"""Write the folder of an experiment, and recall what an identical command printed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import count
from json import dumps
from pathlib import Path
from typing import Any

from fedvlm import __version__
from fedvlm.errors import DataError
from fedvlm.record import Record
from fedvlm.report import tables
from fedvlm.report.runs import TABLE_FILE, listed_runs
from fedvlm.storage.files import INDEX_FILE, file_sha256, read_json, to_toml, write_file, write_json

EXPERIMENT_FORMAT = "fedvlm experiment 1"


def write_folder(
    folder: Path, values: Mapping[str, Any], runs: Sequence[Record], extra_columns: Sequence[str] = (), **options: Any
) -> None:
    """Write the table of an experiment as Markdown and JSON, and its settings as TOML.

    `values` are those of its TOML file, the rest are options of the table. Settings that an earlier command left here
    are kept under a number.
    """
    title = values.get("title") or ""
    head = f"# {title}\n\n" if title else ""
    table = tables.compare_table(runs, "markdown", extra_columns=extra_columns, **options)
    write_file(folder / "table.md", (head + table).encode())
    document = {
        "format": EXPERIMENT_FORMAT,
        "title": title,
        "runs": [str(r.folder.relative_to(folder) if r.folder.is_relative_to(folder) else r.folder) for r in runs],
        "table": tables.table_rows(runs, extra_columns),
        "scores": tables.tidy_rows(runs, extra_columns),
    }
    write_file(folder / TABLE_FILE, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    path, content = folder / f"{folder.name}.toml", to_toml(values).encode()
    if path.exists() and path.read_bytes() != content:
        path.rename(next(place for n in count(1) if not (place := folder / f"{folder.name}-{n}.toml").exists()))
    write_file(path, content)


def with_earlier_runs(folder: Path, runs: Sequence[Record]) -> list[Record]:
    """Return the runs with those that the folder's table already lists."""
    current = {run.folder.resolve() for run in runs}
    return [*runs, *(Record(path) for path in listed_runs(folder) if path.resolve() not in current)]


CACHE_FILE = ".shown.json"


@dataclass(frozen=True)
class FinishedExperiment:
    """An experiment whose runs are all finished."""

    runs: Sequence[str]  # folders, the baselines first
    n_baselines: int
    table_options: Mapping[str, Any]
    title: str
    sentences: Sequence[str]

    @property
    def records(self) -> list[Record]:
        return [Record(Path(path)) for path in self.runs]


def key_of(file: Path | None, arguments: Mapping[str, Any]) -> str:
    """Return the key of a command: the same key means the same runs."""
    text = "" if file is None or not file.exists() else sha256(file.read_bytes()).hexdigest()
    return sha256(dumps([__version__, text, arguments], sort_keys=True).encode()).hexdigest()


def store_experiment(home: Path, key: str, experiment: FinishedExperiment) -> None:
    """Store an experiment under the key of its command, with checksums of its records."""
    ends = [file_sha256(Path(run_path) / INDEX_FILE) for run_path in experiment.runs]
    write_json(home / CACHE_FILE, {"key": key, "ends": ends, **asdict(experiment)})


def load_experiment(home: Path, key: str) -> FinishedExperiment | None:
    """Return the experiment of this key, if none of its records has changed."""
    try:
        stored = read_json(home / CACHE_FILE)
        ends = [file_sha256(Path(run_path) / INDEX_FILE) for run_path in stored["runs"]]
        if stored.pop("key") != key or stored.pop("ends") != ends:
            return None
        return FinishedExperiment(**stored)
    except (DataError, OSError, KeyError, TypeError, AttributeError):
        return None
