"""Runs side by side: mean ± deviation over seeds as text, Markdown or LaTeX; or in long form."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedvlm.errors import SettingsError, unknown
from fedvlm.evaluate import scores
from fedvlm.evaluate.metrics import METRICS
from fedvlm.record import Record
from fedvlm.report import long
from fedvlm.report.columns import on_demand, setting, settings_of, split
from fedvlm.report.names import label
from fedvlm.report.units import written

FORMS = ("text", "markdown", "latex", *long.FORMS)
TRAFFIC = ("exchanges", "kB per client")
MAIN = {
    "G",
    "P",
    "C",
    "own",
    "global",
    "average",
}  # what a table shows first; the rest is per client
MAIN |= {f"{who} {name}" for name in METRICS for who in ("clients", "target")}


def cell(mean: float | None, deviation: float | None, form: str, column: str = "") -> str:
    if mean is None:
        return "-"
    if deviation is None:
        return written(column, mean)
    between = r" $\pm$ " if form == "latex" else " ± "
    return f"{written(column, mean)}{between}{written(column, deviation)}"


def compare(
    results: Sequence[Record],
    form: str = "text",
    every: bool = False,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    traffic: bool = False,
    asked: Sequence[str] = (),
    chance: bool = False,
) -> str:
    """One row per run, in per cent; `every` adds the columns per domain or client.

    `traffic` adds the exchanges of a client and its kilobytes up and down over all of them.
    `asked` are names of columns, and settings by dotted names, which follow the method.
    `paper` has what was published, by row and column; its numbers stand below ours.
    `chance` begins with what guessing would give.
    CSV and JSON have the numbers behind it, one line per seed, training, client and metric.
    """
    if form not in FORMS:
        raise unknown("table form", form, FORMS)
    if not results:
        raise SettingsError("no run is named; give one or more run directories")
    if form in long.FORMS:
        return long.written(results, form, asked)
    head, body = grid(results, form, every, paper, traffic, asked, chance)
    below = [f"{label(one)}: {w}\n" for one in results for w in (*one.far, *one.unsettled)]
    if below and form == "markdown":
        below.insert(0, "\n")  # or the words would be one more row
    return render(head, body, form) + "".join(below if form != "latex" else ())


def grid(
    results: Sequence[Record],
    form: str = "text",
    every: bool = False,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    traffic: bool = False,
    asked: Sequence[str] = (),
    chance: bool = False,
) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of that table."""
    names, settings = split(results, asked)
    found = [scores.spread(result.tables) for result in results]
    columns = list(dict.fromkeys(key for one in found for key in one))
    if not every and (main := [key for key in columns if key in MAIN]):
        columns = main
    shares = list(columns)
    for result, one in zip(results, found, strict=True):
        more = scores.spread(on_demand(result, names))
        one |= more
        columns += [key for key in more if key not in columns]
    last = [*(TRAFFIC if traffic else ()), "seeds"]
    head = ["method", *settings, *columns, *last]
    dashes = ["-" for _ in settings]
    body = []
    if chance:
        guessed = dict(zip(shares, guessing(results[0], shares, form), strict=True))
        cells = [guessed.get(key, cell(None, None, form)) for key in columns]
        body.append(["chance", *dashes, *cells, *("-" for _ in last)])
    for result, one in zip(results, found, strict=True):
        cells = [cell(*one.get(key, (None, None)), form, key) for key in columns]
        exchanges, moved = result.traffic if traffic else (0, 0.0)
        more_ = [f"{exchanges}", f"{moved / 1000:.1f}"] if traffic else []
        before = [label(result, settings), *(setting(result, name) for name in settings)]
        body.append([*before, *cells, *more_, f"{len(result.tables)}"])
    for name, numbers in (paper or {}).items():
        cells = [f"{numbers[key]:.2f}" if key in numbers else "-" for key in columns]
        body.append([f"published: {name}", *dashes, *cells, *("-" for _ in last)])
    return head, body


def rows(results: Sequence[Record], asked: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The same table as numbers, shares of one: each column's mean and deviation over seeds."""
    names, settings = split(results, asked)
    out = []
    for result in results:
        found = scores.spread(result.tables) | scores.spread(on_demand(result, names))
        columns = {key: {"mean": one, "deviation": by} for key, (one, by) in found.items()}
        exchanges, moved = result.traffic
        end = {"exchanges": exchanges, "kB per client": moved / 1000, "seeds": len(result.tables)}
        begin = {"method": label(result, settings), **settings_of(result, settings)}
        out.append({**begin, **columns, **end})
    return out


def guessing(result: Record, columns: Sequence[str], form: str) -> list[str]:
    """One in as many as there are classes, where a column is a share of hits."""
    share = 1 / len(result.manifest["classes"])
    others = {f"{who} {name}" for name in METRICS[1:] for who in ("clients", "target")}
    hits = [key not in others and not key.startswith("deviation ") for key in columns]
    return [cell(share if hit else None, None, form) for hit in hits]


def render(
    head: Sequence[str], body: Sequence[Sequence[str]], form: str, words: bool = False
) -> str:
    """A table; its columns after the first are numbers, set to the right, unless they are words."""
    if form == "latex":

        def escape(text: str) -> str:
            return text.replace("_", r"\_").replace("%", r"\%").replace("&", r"\&")

        lines = [" & ".join(map(escape, row)) + r" \\" for row in (head, *body)]
        begin = rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}"
        rows = [begin, r"\hline", lines[0], r"\hline", *lines[1:], r"\hline", r"\end{tabular}", ""]
        return "\n".join(rows)
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        set_to = str.ljust if words else str.rjust
        cells += [set_to(text, width) for text, width in zip(row[1:], widths[1:], strict=True)]
        return f"| {' | '.join(cells)} |" if form == "markdown" else "  ".join(cells).rstrip()

    rule = ["-" * width for width in widths]
    if form == "markdown":
        rule = [rule[0], *(f"{one[:-1]}:" for one in rule[1:])]
    return "\n".join([line(head), line(rule), *map(line, body), ""])
