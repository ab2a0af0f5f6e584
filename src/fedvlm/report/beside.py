"""A paper's table with ours in it: of every printed number ours, theirs, the gap and a verdict."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedvlm.errors import SettingsError, unknown
from fedvlm.evaluate import scores
from fedvlm.record import Record
from fedvlm.report import long
from fedvlm.report.columns import on_demand
from fedvlm.report.papers import (
    Number,
    Verdict,
    differences,
    find,
    judge,
    matches,
    numbers,
    obstacle,
)
from fedvlm.report.tables import FORMS, render
from fedvlm.report.units import plain, printed, written

# How columns of the papers begin, and the name by which they are asked for.
ASKED = {"kappa": "kappa", "kappa, target ": "kappa-per-target", "cosine": "cosine"}
ASKED |= {"minutes": "minutes", "A[": "A[j][i]", "P, target ": "P-per-target"}
ASKED |= {"C, target ": "C-per-target", "average ": "average", "rows ": "rows"}
GAIN = "gain, "  # over zero-shot, of the column "unseen, …"
ALIKE = ("data", "encoder", "source", "clients", "protocol", "counts", "unseen", "seeds", "smoke")
WIDE = 6  # columns of a piece of a table
HEAD = ["item", "row", "data", "settings", "column", "ours", "our deviation", "printed"]
HEAD += ["printed deviation", "difference", "verdict", "why", "run"]
LINES = ("ours", "printed", "difference", "verdict")
Found = Mapping[str, tuple[float | None, float | None]]  # mean and deviation by column


@dataclass(frozen=True)
class Cell:
    """A printed number and what a run has in its place, in the unit of the print."""

    number: Number
    ours: float | None
    deviation: float | None
    verdict: Verdict | None  # None if no run is of this row
    run: Record | None

    @property
    def difference(self) -> float | None:
        return None if self.ours is None else self.ours - self.number.value


def beside(name: str, results: Sequence[Record]) -> list[Cell]:
    """All printed numbers of a table or figure, in their order, with the nearest run of each."""
    theirs = numbers()[find(name).name]
    asked = {
        name for one in theirs for start, name in ASKED.items() if one.column.startswith(start)
    }
    found = [_columns(one, asked, results) for one in results]
    return [_cell(one, results, found) for one in theirs]


def _columns(result: Record, asked: set[str], results: Sequence[Record]) -> Found:
    more = scores.spread(on_demand(result, sorted(asked))) if asked else {}
    return {**scores.spread(result.tables), **more, **scores.spread(_gains(result, results))}


def _gains(result: Record, results: Sequence[Record]) -> list[scores.Table]:
    """What a run has more on unseen clients than the zero-shot run beside it, seed by seed."""
    own = result.manifest["identity"]
    base = [
        one
        for one in results
        if one.manifest["identity"]["method"]["name"] == "zero-shot"
        and all(one.manifest["identity"][key] == own[key] for key in ALIKE)
    ]
    out: list[scores.Table] = [{} for _ in result.tables]
    for table, theirs, gain in zip(
        result.tables, base[0].tables if base else [], out, strict=False
    ):
        for key, value in table.items():
            less = theirs.get(key)
            if key.startswith("unseen, ") and value is not None and less is not None:
                gain[GAIN + key.removeprefix("unseen, ")] = value - less
    return out


def _cell(number: Number, results: Sequence[Record], found: Sequence[Found]) -> Cell:
    wanted = {"data": number.data, **find(number.name).settings, **number.settings}
    able = [
        (len(differences(wanted, one.manifest["identity"])), place)
        for place, one in enumerate(results)
        if matches(number, one.manifest["identity"])
    ]
    if not able:
        return Cell(number, None, None, None, None)
    place = min(able)[1]
    run = results[place]
    mean, deviation = found[place].get(number.column, (None, None))
    identity = run.manifest["identity"]
    if mean is None:
        why = obstacle(number, identity) or f"the run has no column {number.column!r}"
        return Cell(number, None, None, Verdict("not comparable", why), run)
    ours, spread = printed(number.column, mean, deviation)
    return Cell(number, ours, spread, judge(number, ours, spread, identity), run)


def items_of(results: Sequence[Record]) -> list[str]:
    """The tables and figures that the experiments of some runs reproduce."""
    named = [one for run in results for one in run.manifest.get("reproduces", ())]
    if not named:
        raise SettingsError(
            "none of these runs is of an experiment that reproduces a table; name one, as "
            "--item fedot-v1/T1"
        )
    return list(dict.fromkeys(named))


def paper_table(name: str, results: Sequence[Record], form: str = "text") -> str:
    """An item in the layout of its paper; csv and json have a line per number."""
    if form not in FORMS:
        raise unknown("table form", form, FORMS)
    cells = beside(name, results)
    if form in long.FORMS:
        return long.put(_lines(cells, form), HEAD, form)
    if not cells:
        return _words(f"{name}: nothing is printed in it to compare with", form)
    marks: dict[str, int] = {}
    out = [_words(f"{name}: {find(name).what}", form)]
    for title, columns in _pieces(cells):
        out.append(_words(title, form) + render(*_body(columns, marks, form), form))
    notes = [f"[{mark}] {why}" for why, mark in marks.items()]
    out += [_words(note, form) for note in (*notes, summary(cells))]
    return "\n".join(out)


def paper_tables(names: Sequence[str], results: Sequence[Record], form: str = "text") -> str:
    """Several items one after the other; csv and json are one list."""
    if form in long.FORMS:
        found = [line for name in names for line in _lines(beside(name, results), form)]
        return long.put(found, HEAD, form)
    return "\n".join(paper_table(name, results, form) for name in names)


def summary(cells: Sequence[Cell]) -> str:
    """How many numbers have which verdict."""
    told = Counter(one.verdict.word if one.verdict else "not run" for one in cells)
    return f"{len(cells)} numbers: " + ", ".join(f"{n} {word}" for word, n in told.most_common())


def _words(text: str, form: str) -> str:
    """A line around tables, as a form has it."""
    return {"latex": f"% {text}\n", "markdown": f"{text}\n\n"}.get(form, f"{text}\n")


Key = tuple[str, str, str]  # data, settings that are not the method's, column
Columns = dict[str, dict[str, Cell]]  # by heading: cells by row


def _open(number: Number) -> str:
    """The settings beside the method's in which the numbers of an item differ."""
    every = [one.settings for one in numbers()[number.name]]
    words = [
        f"{key}={_value(value)}"
        for key, value in number.settings.items()
        if not key.startswith("method.") and any(one.get(key) != value for one in every)
    ]
    return ", ".join(words)


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _rows(cells: Sequence[Cell]) -> list[str]:
    """What each cell's row is called; with the method's settings where the name is not enough."""
    keys = [
        (one.number.row, one.number.data, _open(one.number), one.number.column) for one in cells
    ]
    if len(set(keys)) == len(keys):
        return [one.number.row for one in cells]
    return [
        " ".join([one.number.row, *(f"{k[7:]}={v}" for k, v in _own(one.number).items())])
        for one in cells
    ]


def _own(number: Number) -> dict[str, Any]:
    return {key: value for key, value in number.settings.items() if key.startswith("method.")}


def _pieces(cells: Sequence[Cell]) -> list[tuple[str, Columns]]:
    """A table per data set and setting, cut where it is too wide, each with its title.

    Where these have one column only they stand side by side.
    """
    by_key: dict[Key, dict[str, Cell]] = {}
    for row, one in zip(_rows(cells), cells, strict=True):
        key = (one.number.data, _open(one.number), one.number.column)
        by_key.setdefault(key, {})[row] = one
    widths = Counter(key[:2] for key in by_key)
    several = Counter(data for data, _ in widths)
    tables: dict[tuple[str, str], Columns] = {}
    for (data, rest, column), found in by_key.items():
        if max(widths.values()) > 1:
            title, head = (data, rest), column
        elif max(several.values()) > 1:
            title, head = (data, column), rest
        else:
            title, head = (rest, column), data
        tables.setdefault(title, {})[head] = found
    out = []
    for where, columns in tables.items():
        for heads in _cut(list(columns)):
            out.append((", ".join(filter(None, where)), {head: columns[head] for head in heads}))
    return out


def _cut(heads: Sequence[str]) -> list[list[str]]:
    """Headings in pieces of WIDE; those of one unseen domain stay together."""
    groups: dict[str, list[str]] = {}
    for head in heads:
        target = re.match(r"A\[(.*?)\]|., target (.*)", head)
        groups.setdefault("".join(filter(None, target.groups())) if target else head, []).append(
            head
        )
    out: list[list[str]] = [[]]
    for group in groups.values():
        if out[-1] and len(out[-1]) + len(group) > WIDE:
            out.append([])
        out[-1] += group
    return out


def _body(columns: Columns, marks: dict[str, int], form: str) -> tuple[list[str], list[list[str]]]:
    """Four lines per row of the paper; marks gathers the reasons of verdicts."""
    head = ["", "", *columns]
    body = []
    for row in dict.fromkeys(row for found in columns.values() for row in found):
        each = [_four(found.get(row), marks, form) for found in columns.values()]
        for place, line in enumerate(LINES):
            body.append([row if not place else "", line, *(one[place] for one in each)])
    return head, body


def _four(cell: Cell | None, marks: dict[str, int], form: str) -> tuple[str, str, str, str]:
    if cell is None:
        return ("-", "-", "-", "-")
    verdict, number = cell.verdict, cell.number
    word: str = verdict.word if verdict else "not run"
    if verdict and verdict.why:
        word += f" [{marks.setdefault(verdict.why, len(marks) + 1)}]"
    gap = "-" if cell.difference is None else _text(number, cell.difference, "+")
    ours = _pair(number, cell.ours, cell.deviation, form)
    return ours, _pair(number, number.value, number.deviation, form), gap, word


def _text(number: Number, value: float, sign: str = "") -> str:
    text = written(number.column, value if plain(number.column) else value / 100)
    return sign + text if sign and not text.startswith("-") else text


def _pair(number: Number, value: float | None, deviation: float | None, form: str) -> str:
    if value is None:
        return "-"
    between = r" $\pm$ " if form == "latex" else " ± "
    return between.join(_text(number, one) for one in (value, deviation) if one is not None)


def _lines(cells: Sequence[Cell], form: str) -> list[dict[str, Any]]:
    """A line per number, rounded as tables have it."""
    body = []
    for one in cells:
        number = one.number
        settings = ", ".join(f"{key}={_value(value)}" for key, value in number.settings.items())
        known = (one.ours, one.deviation, number.value, number.deviation, one.difference)
        texts = [None if value is None else _text(number, value) for value in known]
        each = texts if form == "csv" else [text and float(text) for text in texts]
        said = [one.verdict.word, one.verdict.why] if one.verdict else ["not run", ""]
        run = str(one.run.folder) if one.run else ""
        where = [number.name, number.row, number.data, settings, number.column]
        body.append(dict(zip(HEAD, [*where, *each, *said, run], strict=True)))
    return body
