"""A table of embeddings as an API's user keeps it: a line per image, in .csv or .parquet.

The embedding is a column of lists, called embedding, or columns numbered alike, as e0, e1, ...
Other columns are label, client, domain, split, group and path; what has another name is left alone.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.data.manifests import csv_lines, parquet_columns
from fedvlm.errors import DataError, listing

TABLES = (".csv", ".parquet")
ALIASES = {
    **dict.fromkeys(("features", "embedding", "embeddings"), "x"),
    **dict.fromkeys(("label", "labels"), "y"),
    **{one: f"{one}s" for one in ("client", "domain", "split", "group", "path")},
}
WORDS = ("y", "clients", "domains", "splits", "groups", "paths")


def read_table(file: Path) -> dict[str, Any]:
    """The columns of a table as a store has them: x, and words as strings."""
    if file.suffix.lower() == ".csv":
        titles, x, cells = _csv(file)
    else:
        titles, x, cells = _parquet(file)
    words = {ALIASES.get(one, one): column for one, column in zip(titles, cells, strict=True)}
    kept = {key: np.array(words[key], np.str_) for key in WORDS if key in words}
    if "y" in kept and not kept["y"].all():
        row = int(np.flatnonzero(kept["y"] == "")[0])
        raise DataError(f"{file}: row {row} has no label; give it one or drop the row")
    return {"x": x, **kept}


def _csv(file: Path) -> tuple[list[str], NDArray[np.float32], list[list[str]]]:
    lines = csv_lines(file, "table")
    header = next(lines)
    which = embedding_columns(file, header)
    others = [i for i, title in enumerate(header) if ALIASES.get(title, title) in WORDS]
    rows: list[NDArray[np.float32]] = []
    cells: list[list[str]] = [[] for _ in others]
    for row, line in enumerate(lines):
        try:
            said = json.loads(line[which]) if isinstance(which, int) else [line[i] for i in which]
            rows.append(np.array([one if one != "" else "nan" for one in said], np.float32))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{file}: row {row} has an embedding of no numbers ({error})"
            ) from error
        for column, i in zip(cells, others, strict=True):
            column.append(line[i])
    return [header[i] for i in others], stacked(file, rows), cells


def _parquet(file: Path) -> tuple[list[str], NDArray[np.float32], list[list[str]]]:
    columns = parquet_columns(file, "table")
    which = embedding_columns(file, list(columns))
    values = list(columns.values())
    lists: Iterable[Any] = (
        values[which] if isinstance(which, int) else zip(*(values[i] for i in which), strict=True)
    )
    try:
        rows = [np.array(one, np.float32) for one in lists]
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} has an embedding of no numbers ({error})") from error
    titles = [one for one in columns if ALIASES.get(one, one) in WORDS]
    cells = [["" if c is None else str(c).strip() for c in columns[one]] for one in titles]
    return titles, stacked(file, rows), cells


def embedding_columns(file: Path, titles: Sequence[str]) -> int | list[int]:
    """Where the embedding is: one column of lists, or columns numbered without a gap."""
    lists = [i for i, one in enumerate(titles) if ALIASES.get(one, one) == "x"]
    if len(lists) == 1:
        return lists[0]
    found: dict[str, dict[int, int]] = {}
    for i, title in enumerate(titles):
        if parts := re.fullmatch(r"(.*?)(\d+)", title):
            found.setdefault(parts[1], {})[int(parts[2])] = i
    largest = max(found.values(), key=len, default={})
    first = min(largest, default=0)
    if len(largest) < 2 or max(largest) - first + 1 != len(largest):
        raise DataError(
            f"{file} has no embedding among its columns {listing(list(titles))}; call a column of "
            "lists embedding, or number columns without a gap, as e0, e1, e2"
        )
    return [largest[number] for number in sorted(largest)]


def stacked(file: Path, rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    lengths = {one.shape for one in rows}
    if len(lengths) != 1:
        said = f"of {listing(sorted(map(str, lengths)))}" if rows else "in no row"
        raise DataError(f"{file}: embeddings are {said}; all rows take one of the same length")
    return np.stack(rows)
