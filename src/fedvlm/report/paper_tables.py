"""Print a paper's table with measured numbers: measured, printed, difference and verdict."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedvlm.errors import SettingsError, unknown_name
from fedvlm.evaluate import metrics
from fedvlm.record import Record
from fedvlm.report import tables
from fedvlm.report.columns import compute_columns, format_number, is_unscaled, to_printed_unit
from fedvlm.report.papers import (
    PrintedNumber,
    Verdict,
    VerdictWord,
    differences,
    find_item,
    incomparable_reason,
    judge_number,
    matches_method,
    numbers,
)
from fedvlm.report.tables import TABLE_FORMS, render_table

# How columns of the papers begin, and the name by which they are asked for.
COLUMN_BY_PREFIX = {"condition_number": "condition_number", "cosine": "cosine"}
COLUMN_BY_PREFIX |= {"condition_number, target ": "condition_number-per-target"}
COLUMN_BY_PREFIX |= {"minutes": "minutes", "A[": "A[j][i]", "P, target ": "P-per-target"}
COLUMN_BY_PREFIX |= {"C, target ": "C-per-target", "average ": "average", "rows ": "rows"}
GAIN_PREFIX = "gain, "  # over zero-shot, of the column "unseen, …"
SHARED_SETTINGS = ("data", "encoder", "source", "clients", "protocol", "counts", "unseen", "seeds", "smoke")
MAX_COLUMNS = 6  # columns of a piece of a table
CSV_COLUMNS = ["item", "row", "data", "settings", "column", "ours", "our deviation", "printed"]
CSV_COLUMNS += ["printed deviation", "difference", "verdict", "why", "run"]
CELL_LINES = ("ours", "printed", "difference", "verdict")
ColumnStatistics = Mapping[str, tuple[float | None, float | None]]  # mean and deviation by column


@dataclass(frozen=True)
class PaperCell:
    """A printed number and the measured one of a run, in the printed unit."""

    number: PrintedNumber
    measured: float | None
    deviation: float | None
    verdict: Verdict | None  # None if no run is of this row
    run: Record | None

    @property
    def difference(self) -> float | None:
        return None if self.measured is None else self.measured - self.number.value


def compare_with_paper(name: str, results: Sequence[Record]) -> list[PaperCell]:
    """Return all printed numbers of a table or figure with the closest run of each."""
    theirs = numbers()[find_item(name).name]
    requested = {name for start, name in COLUMN_BY_PREFIX.items() if any(n.column.startswith(start) for n in theirs)}
    column_statistics = []
    for result in results:
        tables_of_run = (result.tables, compute_columns(result, sorted(requested)), _zero_shot_gains(result, results))
        statistics: dict[str, tuple[float | None, float | None]] = {}
        for seed_tables in tables_of_run:
            statistics |= metrics.mean_and_std(seed_tables)
        column_statistics.append(statistics)
    return [_cell(number, results, column_statistics) for number in theirs]


def _zero_shot_gains(result: Record, results: Sequence[Record]) -> list[metrics.Table]:
    """Return the gains of a run over zero-shot on unseen clients, seed by seed."""
    identity = result.manifest["identity"]
    identities = [(run, run.manifest["identity"]) for run in results]
    zero_shot = [(run, other) for run, other in identities if other["method"]["name"] == "zero-shot"]
    base = [run for run, other in zero_shot if all(other[key] == identity[key] for key in SHARED_SETTINGS)]
    out: list[metrics.Table] = [{} for _ in result.tables]
    for table, theirs, gain in zip(result.tables, base[0].tables if base else [], out, strict=False):
        for key, value in table.items():
            less = theirs.get(key)
            if key.startswith("unseen, ") and value is not None and less is not None:
                gain[GAIN_PREFIX + key.removeprefix("unseen, ")] = value - less
    return out


def _cell(number: PrintedNumber, results: Sequence[Record], column_statistics: Sequence[ColumnStatistics]) -> PaperCell:
    expected = {"data": number.data, **find_item(number.name).settings, **number.settings}
    identities = [candidate.manifest["identity"] for candidate in results]
    matching = [place for place, other in enumerate(identities) if matches_method(number, other)]
    able = [(len(differences(expected, identities[place])), place) for place in matching]
    if not able:
        return PaperCell(number, None, None, None, None)
    place = min(able)[1]
    run = results[place]
    mean, deviation = column_statistics[place].get(number.column, (None, None))
    identity = run.manifest["identity"]
    if mean is None:
        reason = incomparable_reason(number, identity) or f"the run has no column {number.column!r}"
        return PaperCell(number, None, None, Verdict("not comparable", reason), run)
    measured, spread = to_printed_unit(number.column, mean, deviation)
    return PaperCell(number, measured, spread, judge_number(number, measured, spread, identity), run)


def items_of(results: Sequence[Record]) -> list[str]:
    """Return the tables and figures that the experiments of some runs reproduce."""
    named = [item for run in results for item in run.manifest.get("reproduces", ())]
    if not named:
        raise SettingsError("none of these runs reproduces a table; name one, as --item fedot-v1/T1")
    return list(dict.fromkeys(named))


def paper_table(name: str, results: Sequence[Record], form: str = "text") -> str:
    """Return an item in the layout of its paper; csv and json have a row per number."""
    if form not in TABLE_FORMS:
        raise unknown_name("table form", form, TABLE_FORMS)
    cells = compare_with_paper(name, results)
    if form in tables.TIDY_FORMS:
        return tables.serialise(_csv_rows(cells, form), CSV_COLUMNS, form)
    if not cells:
        return _format_line(f"{name}: nothing is printed in it to compare with", form)
    marks: dict[str, int] = {}
    out = [_format_line(f"{name}: {find_item(name).title}", form)]
    for title, columns in _split_tables(cells):
        out.append(_format_line(title, form) + render_table(*_table_body(columns, marks, form), form))
    notes = [f"[{mark}] {reason}" for reason, mark in marks.items()]
    out += [_format_line(line, form) for line in (*notes, summary(cells))]
    return "\n".join(out)


def paper_tables(names: Sequence[str], results: Sequence[Record], form: str = "text") -> str:
    """Return several items one after the other; csv and json are one list."""
    if form in tables.TIDY_FORMS:
        lines = [line for name in names for line in _csv_rows(compare_with_paper(name, results), form)]
        return tables.serialise(lines, CSV_COLUMNS, form)
    return "\n".join(paper_table(name, results, form) for name in names)


def summary(cells: Sequence[PaperCell]) -> str:
    """Count the verdicts."""
    counts = Counter(cell.verdict.word if cell.verdict else "not run" for cell in cells)
    return f"{len(cells)} numbers: " + ", ".join(f"{n} {word}" for word, n in counts.most_common())


def _format_line(text: str, form: str) -> str:
    """Format a line around tables."""
    return {"latex": f"% {text}\n", "markdown": f"{text}\n\n"}.get(form, f"{text}\n")


Key = tuple[str, str, str]  # data, settings that are not the method's, column
Columns = dict[str, dict[str, PaperCell]]  # by heading: cells by row


def _open_settings(number: PrintedNumber) -> str:
    """Return the settings, other than the method's, in which the numbers of an item differ."""
    all_settings = [settings.settings for settings in numbers()[number.name]]
    rest = {key: value for key, value in number.settings.items() if not key.startswith("method.")}
    open_ = {key for key in rest if any(settings.get(key) != rest[key] for settings in all_settings)}
    words = [f"{key}={_value(value)}" for key, value in rest.items() if key in open_]
    return ", ".join(words)


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _row_names(cells: Sequence[PaperCell]) -> list[str]:
    """Return the name of each cell's row, with the method's settings where it is ambiguous."""
    keys = [(cell.number.row, cell.number.data, _open_settings(cell.number), cell.number.column) for cell in cells]
    if len(set(keys)) == len(keys):
        return [cell.number.row for cell in cells]
    rows = []
    for cell in cells:
        settings = [f"{k[7:]}={v}" for k, v in cell.number.settings.items() if k.startswith("method.")]
        rows.append(" ".join([cell.number.row, *settings]))
    return rows


def _split_tables(cells: Sequence[PaperCell]) -> list[tuple[str, Columns]]:
    """Split into a table per data set and setting, none too wide, each with its title.

    Where these have one column only they stand side by side.
    """
    by_key: dict[Key, dict[str, PaperCell]] = {}
    for row, cell in zip(_row_names(cells), cells, strict=True):
        key = (cell.number.data, _open_settings(cell.number), cell.number.column)
        by_key.setdefault(key, {})[row] = cell
    widths = Counter(key[:2] for key in by_key)
    several = Counter(data for data, _ in widths)
    tables: dict[tuple[str, str], Columns] = {}
    for (data, rest, column), cells_by_row in by_key.items():
        if max(widths.values()) > 1:
            title, head = (data, rest), column
        elif max(several.values()) > 1:
            title, head = (data, column), rest
        else:
            title, head = (rest, column), data
        tables.setdefault(title, {})[head] = cells_by_row
    out = []
    for heading, columns in tables.items():
        for heads in _split_headings(list(columns)):
            out.append((", ".join(filter(None, heading)), {head: columns[head] for head in heads}))
    return out


def _split_headings(heads: Sequence[str]) -> list[list[str]]:
    """Headings in pieces of WIDE; those of one unseen domain stay together."""
    groups: dict[str, list[str]] = {}
    for head in heads:
        target = re.match(r"A\[(.*?)\]|., target (.*)", head)
        groups.setdefault("".join(filter(None, target.groups())) if target else head, []).append(head)
    out: list[list[str]] = [[]]
    for group in groups.values():
        if out[-1] and len(out[-1]) + len(group) > MAX_COLUMNS:
            out.append([])
        out[-1] += group
    return out


def _table_body(columns: Columns, marks: dict[str, int], form: str) -> tuple[list[str], list[list[str]]]:
    """Return four lines per row of the paper; `marks` collects the reasons of verdicts."""
    head = ["", "", *columns]
    body = []
    for row in dict.fromkeys(row for cells_by_row in columns.values() for row in cells_by_row):
        cell_texts = [_cell_lines(cells_by_row.get(row), marks, form) for cells_by_row in columns.values()]
        for place, line in enumerate(CELL_LINES):
            body.append([row if not place else "", line, *(texts[place] for texts in cell_texts)])
    return head, body


def _cell_lines(cell: PaperCell | None, marks: dict[str, int], form: str) -> tuple[str, str, str, str]:
    if cell is None:
        return ("-", "-", "-", "-")
    verdict, number = cell.verdict, cell.number
    word: str = verdict.word if verdict else "not run"
    if verdict and verdict.reason:
        word += f" [{marks.setdefault(verdict.reason, len(marks) + 1)}]"
    gap = "-" if cell.difference is None else _format_value(number, cell.difference, "+")
    measured = _format_with_std(number, cell.measured, cell.deviation, form)
    return measured, _format_with_std(number, number.value, number.deviation, form), gap, word


def _format_value(number: PrintedNumber, value: float, sign: str = "") -> str:
    text = format_number(number.column, value if is_unscaled(number.column) else value / 100)
    return sign + text if sign and not text.startswith("-") else text


def _format_with_std(number: PrintedNumber, value: float | None, deviation: float | None, form: str) -> str:
    if value is None:
        return "-"
    between = r" $\pm$ " if form == "latex" else " ± "
    return between.join(_format_value(number, part) for part in (value, deviation) if part is not None)


def _csv_rows(cells: Sequence[PaperCell], form: str) -> list[dict[str, Any]]:
    """Return a row per number, rounded as in tables."""
    body = []
    for cell in cells:
        number = cell.number
        settings = ", ".join(f"{key}={_value(value)}" for key, value in number.settings.items())
        values = (cell.measured, cell.deviation, number.value, number.deviation, cell.difference)
        texts = [None if value is None else _format_value(number, value) for value in values]
        formatted = texts if form == "csv" else [text and float(text) for text in texts]
        verdict_texts = [cell.verdict.word, cell.verdict.reason] if cell.verdict else ["not run", ""]
        run = str(cell.run.folder) if cell.run else ""
        identification = [number.name, number.row, number.data, settings, number.column]
        body.append(dict(zip(CSV_COLUMNS, [*identification, *formatted, *verdict_texts, run], strict=True)))
    return body


VERDICT_ORDER: tuple[VerdictWord, ...] = ("suspicious", "met", "within noise", "differs", "void", "not comparable")


def compare_with_papers(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per printed number of a run's method, settings and data that the run has as well."""
    rows = []
    for place, run in enumerate(runs):
        identity, statistics = run["identity"], metrics.mean_and_std(run["tables"])
        for item in run["reproduces"] or ():
            for number in numbers().get(item, ()):
                mean, std = statistics.get(number.column, (None, None))
                if mean is None or number.data != identity["data"] or not matches_method(number, identity):
                    continue
                measured, std = to_printed_unit(number.column, mean, std)
                verdict = judge_number(number, measured, std, identity)
                row = {"item": item, "row": number.row, "run": place, "column": number.column}
                row |= {"measured": round(measured, 4), "std": std and round(std, 4)}
                row |= {"published": number.value, "published std": number.deviation, "round": number.round}
                rows.append({**row, "verdict": verdict.word, "reason": verdict.reason})
    return sorted(rows, key=lambda row: VERDICT_ORDER.index(row["verdict"]))


def verdict_sentence(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Count the verdicts in one sentence; none where nothing is printed."""
    if not rows:
        return []
    counts = Counter(row["verdict"] for row in rows)
    texts = [f"{counts[word]} {word}" for word in VERDICT_ORDER if counts[word]]
    return [f"Of {len(rows)} published numbers that these runs have too: {', '.join(texts)}."]
