"""Read lists of images: a CSV or Parquet manifest, and the split files of CoOp."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.data.sources import Files
from fedvlm.data.splits import read_splits
from fedvlm.data.table import (
    FINDING_TEMPLATES,
    Dataset,
    Source,
    anonymise_groups,
    check_class_names,
    encode_findings,
    string_column,
    tabulate,
    to_nfc,
)
from fedvlm.errors import DataError, join_names, suggest_path
from fedvlm.plugins import require

REQUIRED_COLUMNS = ("path", "label")
OPTIONAL_COLUMNS = ("client", "domain", "split", "group")
MAX_FINDING_VALUES = 4  # with as few different cells, one of them 1, a column may be meant as a finding
NO_FINDING = "no finding"  # in a column labels: none of the findings; an empty cell is unknown


def read_manifest(path: str | Path, classes: Sequence[str] | None = None) -> Dataset:
    """A CSV or Parquet file with the columns path and label, and any of client, domain, split, group.

    Instead of label it may have several findings per image: a column labels with names separated by |, or one column
    of 0, 1 and empty cells (unknown) per finding. Paths are relative to the manifest's folder and stay below it.
    An image with an empty label has none.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"there is no manifest {file}; {suggest_path(file)}name a .csv or .parquet file")
    columns = _columns(file)
    findings = None if "label" in columns else read_findings(str(file), columns, classes)
    for required in REQUIRED_COLUMNS:
        if required not in columns and (required == "path" or findings is None):
            raise DataError(
                f"the manifest {file} has no column {required!r}; it has {join_names(list(columns))}; "
                f"it needs {' and '.join(REQUIRED_COLUMNS)} (or labels, or a column of 0 and 1 per finding), and may "
                f"have {', '.join(OPTIONAL_COLUMNS)}; "
                f"if it holds embeddings: --encoder store:{file}"
            )
    names = _paths(file, file.parent, columns["path"])
    optional = [columns.get(key) for key in ("domain", "client", "split")]
    if findings is None:
        table = tabulate(file.stem, Files(file.parent, names), columns["label"], classes, *optional)
    else:
        table = tabulate_findings(file.stem, Files(file.parent, names), findings, *optional)
    groups = columns.get("group")
    used = {*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS, "labels", *(() if findings is None else findings[0])}
    others = {title: cells for title, cells in columns.items() if title not in used}
    subgroups = {title: string_column(cells, len(names)) for title, cells in others.items()}
    _check_repeated_rows(str(file), names, table)
    notes = (*table.notes, *(_near_findings(others) if findings is not None else ()))
    groups_column = None if groups is None else anonymise_groups(groups)
    return replace(table, groups=groups_column, subgroups=subgroups, notes=notes)


def _check_repeated_rows(context: str, names: Sequence[str], table: Dataset) -> None:
    """Refuse an image that two rows give different labels."""
    first: dict[str, int] = {}
    for row, name in enumerate(names):
        before = first.setdefault(name, row)
        if table.labels[row] != table.labels[before]:
            problem = f"{context}: rows {before + 1} and {row + 1} give {name} different labels"
            raise DataError(f"{problem}; give it one row, with all its findings if it has several")


def _near_findings(columns: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Name columns that are no findings, but may have been meant as such."""
    for title, cells in columns.items():
        values = sorted(set(cells) - {""})
        if not values:
            yield f"the column {title!r} is empty, and no finding"
        elif {"1", "1.0"} & set(values) and len(values) <= MAX_FINDING_VALUES:
            yield f"the column {title!r} has the cells {join_names(values)}, so it is a subgroup and no finding"


def read_findings(
    context: str, columns: Mapping[str, Sequence[str]], classes: Sequence[str] | None = None
) -> tuple[list[str], NDArray[np.float64]] | None:
    """Return findings and their matrix (samples, findings), NaN where unknown; None if no column holds findings."""
    if "labels" in columns:
        cells = [[to_nfc(name.strip()) for name in cell.split("|") if name.strip()] for cell in columns["labels"]]
        present = {name for cell in cells for name in cell if name.lower() != NO_FINDING}
        names = sorted(present) if classes is None else [to_nfc(name) for name in classes]
        if unknown := sorted(present - set(names)):
            raise DataError(f"{context}: {unknown[0]!r} is no finding; the findings are {join_names(names)}")
        for row, cell in enumerate(cells):
            if len(cell) > 1 and any(name.lower() == NO_FINDING for name in cell):
                raise DataError(f"{context}: row {row + 1} has {'|'.join(cell)!r}; it has a finding, or no finding")
        matrix = np.array([[float(name in cell) if cell else nan for name in names] for cell in cells])
        return names, matrix.reshape(len(cells), len(names))
    known = {*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS}
    values = {"0": 0.0, "0.0": 0.0, "1": 1.0, "1.0": 1.0, "": nan, "nan": nan}
    candidates = {title: cells for title, cells in columns.items() if title not in known and any(cells)}
    titles = [title for title, cells in candidates.items() if all(cell.lower() in values for cell in cells)]
    if classes is not None:
        if missing := sorted({name.lower() for name in classes} - set(columns)):
            raise DataError(f"{context} has no column {missing[0]!r} for that finding")
        titles = [name.lower() for name in classes]
    if not titles:
        return None
    for title in titles:
        if wrong := [cell for cell in columns[title] if cell.lower() not in values]:
            raise DataError(f"{context}: {title!r} has the cell {wrong[0]!r}; a finding is 1, 0 or empty (unknown)")
    return titles, np.array([[values[cell.lower()] for cell in columns[title]] for title in titles]).T


def tabulate_findings(
    name: str,
    source: Source,
    findings: tuple[list[str], NDArray[np.float64]],
    domains: Sequence[str] | None = None,
    clients: Sequence[str] | None = None,
    splits: Sequence[str] | None = None,
) -> Dataset:
    """Make a data set with several findings per image from their names and a matrix (samples, findings)."""
    titles, matrix = findings
    classes = [title.replace("_", " ") for title in titles]
    check_class_names(name, classes)
    if not len(matrix):
        raise DataError(f"{name} has no images; name a place that has some")
    for title, column in zip(classes, matrix.T, strict=True):
        if not (column == 1).any():
            raise DataError(f"{name}: no image has the finding {title!r}; leave it out")
    labels, patterns = encode_findings(name, matrix, classes)
    rows = len(matrix)
    return Dataset(
        name=name,
        classes=tuple(classes),
        source=source,
        labels=labels,
        domains=string_column(domains, rows),
        clients=string_column(clients, rows),
        splits=read_splits(name, splits or [""] * rows, source.name),
        templates=FINDING_TEMPLATES,
        findings=patterns,
    )


def read_coop(path: str | Path, images: str | Path | None = None) -> Dataset:
    """A `split_zhou_*.json` of CoOp: images, labels and class names of train, val and test.

    The images are below `images`; without it, below the file's folder or a folder in it.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"there is no split file {file}; {suggest_path(file)}name a split_zhou_*.json of CoOp")
    form = 'it must hold {"train": [[path, label, class], ...], "val": ..., "test": ...}'
    try:
        parts = json.loads(file.read_text(encoding="utf-8"))
        lines = [(*item, split) for split, items in parts.items() for item in items]
        rows = [(str(name), int(label), str(title), str(split)) for name, label, title, split in lines]
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{file} is not a split file of CoOp ({error}); {form}") from error
    if not rows:
        raise DataError(f"{file} lists no images; {form}")
    titles: dict[int, str] = {}
    for name, label, title, _ in rows:
        if titles.setdefault(label, title) != title:
            raise DataError(f"{file}: label {label} is {titles[label]!r} and, at {name}, {title!r}; give it one class")
    classes = [titles[label] for label in sorted(titles)]
    if sorted(titles) != list(range(len(titles))) or len(set(classes)) < len(classes):
        raise DataError(f"{file}: the labels are not 0, 1, 2, ... with one class each; get it again")
    root = _root(file, images, rows[0][0])
    files = Files(root, _paths(file, root, [name for name, *_ in rows]))
    labels, splits = [title for _, _, title, _ in rows], [split for *_, split in rows]
    return tabulate(file.stem.removeprefix("split_zhou_"), files, labels, classes, splits=splits)


def csv_lines(file: Path, file_kind: str) -> Iterator[list[str]]:
    """Yield the header of a CSV in lower case, then its lines with stripped cells."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            stream.seek(0)
            # spreadsheets write the separator of their locale
            lines = csv.reader(stream, delimiter=max(",;\t", key=first.count), strict=True)
            header = [title.strip().lower() for title in next(lines, [])]
            if not header:
                raise DataError(f"the {file_kind} {file} is empty; its first line names its columns")
            yield header
            for row, line in enumerate((line for line in lines if line), start=1):
                if len(line) != len(header):
                    lengths = f"{len(line)} cells and the header {len(header)}"
                    raise DataError(f"the {file_kind} {file}: row {row} has {lengths}; quote cells that hold a comma")
                yield [cell.strip() for cell in line]
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise DataError(f"the {file_kind} {file} is no CSV in UTF-8 ({error}); save it as one") from error


def parquet_columns(file: Path, file_kind: str) -> dict[str, list[Any]]:
    """Return the columns of a Parquet file by title in lower case."""
    parquet = require("pyarrow.parquet", f"reading {file} needs pyarrow", "datasets", DataError)
    try:
        columns: dict[str, list[Any]] = parquet.read_table(file).to_pydict()
    except (OSError, ValueError) as error:
        raise DataError(f"the {file_kind} {file} is no Parquet file ({error}); get it again") from error
    return {title.strip().lower(): cells for title, cells in columns.items()}


def _columns(file: Path) -> dict[str, list[str]]:
    if file.suffix.lower() == ".parquet":
        columns = parquet_columns(file, "manifest").items()
        return {title: ["" if cell is None else str(cell).strip() for cell in cells] for title, cells in columns}
    header, *lines = csv_lines(file, "manifest")
    return {title: [line[index] for line in lines] for index, title in enumerate(header)}


def _paths(file: Path, root: Path, names: Sequence[str]) -> list[str]:
    """Check that each name is a file below the root."""
    top = root.resolve()
    below: dict[Path, bool] = {}  # by folder
    for row, name in enumerate(names):
        location = f"{file}: row {row + 1} names {name!r}"
        image = top / name
        folder = image.parent
        if folder not in below:
            below[folder] = folder.resolve().is_relative_to(top)
        inside = below[folder] and image.name != ".."
        if image.is_symlink():
            inside = image.resolve().is_relative_to(top)
        if not name or Path(name).is_absolute() or not inside:
            raise DataError(f"{location}, which is not below {root}; use paths relative to {root}")
        if not image.is_file():
            raise DataError(f"{location}, which is not there; put the image in {root} or drop the row")
    return list(names)


def _root(file: Path, images: str | Path | None, first: str) -> Path:
    """Find the folder of the first image: the one given, that of the file, or one in it."""
    parent = file.parent
    tried = [Path(images)] if images else [parent, *sorted(p for p in parent.iterdir() if p.is_dir())]
    for folder in tried:
        if (folder / first).is_file():
            return folder
    places = join_names([str(folder) for folder in tried])
    problem = f"{first}, the first image of {file}, is not below {places}"
    raise DataError(f"{problem}; name the folder of the images as images")
