"""The folder of an experiment: its runs, their table as Markdown and JSON, and what was asked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from fedvlm import __version__
from fedvlm.errors import DataError
from fedvlm.record import Record
from fedvlm.report import tables
from fedvlm.report.runs import TABLE_FILE
from fedvlm.storage.files import INDEX_FILE, file_sha256, read_json, to_toml, write_file, write_json

EXPERIMENT_FORMAT = "fedvlm experiment 1"


def write_folder(
    folder: Path,
    values: Mapping[str, Any],
    runs: Sequence[Record],
    extra_columns: Sequence[str] = (),
    **options: Any,
) -> None:
    """`values` are those of its TOML file; `asked` and other `options` are those of the table."""
    title = values.get("title")
    options["extra_columns"] = extra_columns
    head = f"# {title}\n\n" if title else ""
    write_file(folder / "table.md", (head + tables.compare_table(runs, "markdown", **options)).encode())
    document = {
        "format": EXPERIMENT_FORMAT,
        "title": title or "",
        "runs": [_relative_path(run.folder, folder) for run in runs],
        "table": tables.table_rows(runs, extra_columns),
        "scores": tables.tidy_rows(runs, extra_columns),
    }
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    write_file(folder / TABLE_FILE, text.encode())
    write_file(folder / f"{folder.name}.toml", to_toml(values).encode())


def _relative_path(run: Path, folder: Path) -> str:
    return str(run.relative_to(folder)) if run.is_relative_to(folder) else str(run)


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
