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
from fedvlm.errors import DataError, join_names

TABLE_SUFFIXES = (".csv", ".parquet")
ALIASES = {
    **dict.fromkeys(("features", "embedding", "embeddings"), "x"),
    **dict.fromkeys(("label", "labels"), "y"),
    **{title: f"{title}s" for title in ("client", "domain", "split", "group", "path")},
}
TEXT_COLUMNS = ("y", "clients", "domains", "splits", "groups", "paths")


def read_table(file: Path) -> dict[str, Any]:
    """The columns of a table as a store has them: x, and words as strings."""
    if file.suffix.lower() == ".csv":
        titles, x, cells = _csv(file)
    else:
        titles, x, cells = _parquet(file)
    words = {ALIASES.get(title, title): column for title, column in zip(titles, cells, strict=True)}
    text_columns = {key: np.array(words[key], np.str_) for key in TEXT_COLUMNS if key in words}
    if "y" in text_columns and not text_columns["y"].all():
        row = int(np.flatnonzero(text_columns["y"] == "")[0])
        raise DataError(f"{file}: row {row} has no label; give it one or drop the row")
    return {"x": x, **text_columns}


def _csv(file: Path) -> tuple[list[str], NDArray[np.float32], list[list[str]]]:
    lines = csv_lines(file, "table")
    header = next(lines)
    embedding_index = embedding_columns(file, header)
    text_indices = [i for i, title in enumerate(header) if ALIASES.get(title, title) in TEXT_COLUMNS]
    rows: list[NDArray[np.float32]] = []
    cells: list[list[str]] = [[] for _ in text_indices]
    for row, line in enumerate(lines):
        try:
            cell_values = (
                json.loads(line[embedding_index])
                if isinstance(embedding_index, int)
                else [line[i] for i in embedding_index]
            )
            rows.append(np.array([cell if cell != "" else "nan" for cell in cell_values], np.float32))
        except (ValueError, TypeError) as error:
            raise DataError(f"{file}: row {row} has an embedding of no numbers ({error})") from error
        for column, i in zip(cells, text_indices, strict=True):
            column.append(line[i])
    return [header[i] for i in text_indices], stack_rows(file, rows), cells


def _parquet(file: Path) -> tuple[list[str], NDArray[np.float32], list[list[str]]]:
    columns = parquet_columns(file, "table")
    embedding_index = embedding_columns(file, list(columns))
    values = list(columns.values())
    lists: Iterable[Any] = (
        values[embedding_index]
        if isinstance(embedding_index, int)
        else zip(*(values[i] for i in embedding_index), strict=True)
    )
    try:
        rows = [np.array(entry, np.float32) for entry in lists]
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} has an embedding of no numbers ({error})") from error
    titles = [entry for entry in columns if ALIASES.get(entry, entry) in TEXT_COLUMNS]
    cells = [["" if c is None else str(c).strip() for c in columns[entry]] for entry in titles]
    return titles, stack_rows(file, rows), cells


def embedding_columns(file: Path, titles: Sequence[str]) -> int | list[int]:
    """Where the embedding is: one column of lists, or columns numbered without a gap."""
    lists = [i for i, title in enumerate(titles) if ALIASES.get(title, title) == "x"]
    if len(lists) == 1:
        return lists[0]
    numbered: dict[str, dict[int, int]] = {}
    for i, title in enumerate(titles):
        if parts := re.fullmatch(r"(.*?)(\d+)", title):
            numbered.setdefault(parts[1], {})[int(parts[2])] = i
    largest = max(numbered.values(), key=len, default={})
    first = min(largest, default=0)
    if len(largest) < 2 or max(largest) - first + 1 != len(largest):
        raise DataError(
            f"{file} has no embedding among its columns {join_names(list(titles))}; call a column of "
            "lists embedding, or number columns without a gap, as e0, e1, e2"
        )
    return [largest[number] for number in sorted(largest)]


def stack_rows(file: Path, rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    lengths = {row.shape for row in rows}
    if len(lengths) != 1:
        problem = f"of {join_names(sorted(map(str, lengths)))}" if rows else "in no row"
        raise DataError(f"{file}: embeddings are {problem}; all rows take one of the same length")
    return np.stack(rows)
