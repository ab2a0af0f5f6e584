"""The folder of an experiment: its runs, their table as Markdown and JSON, and what was asked."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvlm.record import Record
from fedvlm.report import long, tables
from fedvlm.storage.files import write
from fedvlm.storage.toml import toml

TABLE = "table.json"
FORMAT = "fedvlm experiment 1"


def write_folder(
    folder: Path,
    values: Mapping[str, Any],
    runs: Sequence[Record],
    asked: Sequence[str] = (),
    **options: Any,
) -> None:
    """`values` are those of its TOML file; `asked` and other `options` are those of the table."""
    title = values.get("title")
    options["asked"] = asked
    head = f"# {title}\n\n" if title else ""
    write(folder / "table.md", (head + tables.compare(runs, "markdown", **options)).encode())
    whole = {
        "format": FORMAT,
        "title": title or "",
        "runs": [_place(one.folder, folder) for one in runs],
        "table": tables.rows(runs, asked),
        "scores": long.lines(runs, asked),
    }
    text = json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
    write(folder / TABLE, text.encode())
    write(folder / f"{folder.name}.toml", toml(values).encode())


def runs_in(folder: Path) -> list[Path]:
    """The finished runs of an experiment's folder: those of its table first; none of another's."""
    if (folder / "manifest.json").exists():
        return []
    there = sorted([*folder.glob("*/result.json"), *folder.glob("bars/*/result.json")])
    found = [path.parent for path in there]
    try:
        listed = json.loads((folder / TABLE).read_bytes())["runs"]
        first = [folder / one for one in listed]
    except (OSError, ValueError, KeyError, TypeError):
        first = []
    return sorted(found, key=lambda one: first.index(one) if one in first else len(first))


def _place(run: Path, folder: Path) -> str:
    return str(run.relative_to(folder)) if run.is_relative_to(folder) else str(run)
