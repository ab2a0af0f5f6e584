"""The folder of an experiment: its runs, their table as Markdown and JSON, and what was asked."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvlm.record import Record
from fedvlm.report import long, tables
from fedvlm.storage.files import write_file
from fedvlm.storage.toml import to_toml

TABLE_FILE = "table.json"
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
        "scores": long.tidy_rows(runs, extra_columns),
    }
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    write_file(folder / TABLE_FILE, text.encode())
    write_file(folder / f"{folder.name}.toml", to_toml(values).encode())


def runs_in(folder: Path) -> list[Path]:
    """The finished runs of an experiment's folder: those of its table first; none of another's."""
    if (folder / "manifest.json").exists():
        return []
    result_paths = sorted([*folder.glob("*/result.json"), *folder.glob("bars/*/result.json")])
    folders = [path.parent for path in result_paths]
    try:
        listed = json.loads((folder / TABLE_FILE).read_bytes())["runs"]
        first = [folder / path for path in listed]
    except (OSError, ValueError, KeyError, TypeError):
        first = []
    return sorted(folders, key=lambda path: first.index(path) if path in first else len(first))


def _relative_path(run: Path, folder: Path) -> str:
    return str(run.relative_to(folder)) if run.is_relative_to(folder) else str(run)
