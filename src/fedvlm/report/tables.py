"""Runs side by side: mean ± deviation over seeds as text, Markdown or LaTeX; or in long form."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedvlm.errors import SettingsError, unknown_name
from fedvlm.evaluate import metrics
from fedvlm.evaluate.metrics import METRICS
from fedvlm.record import Record
from fedvlm.report import long
from fedvlm.report.columns import compute_columns, setting_text, settings_of, split_requested
from fedvlm.report.names import run_label
from fedvlm.report.units import format_number

TABLE_FORMS = ("text", "markdown", "latex", *long.TIDY_FORMS)
TRAFFIC_COLUMNS = ("exchanges", "kB per client")
MAIN_COLUMNS = {
    "G",
    "P",
    "C",
    "own",
    "global",
    "average",
}  # what a table shows first; the rest is per client
MAIN_COLUMNS |= {f"{group} {name}" for name in METRICS for group in ("clients", "target")}


def format_cell(mean: float | None, deviation: float | None, form: str, column: str = "") -> str:
    if mean is None:
        return "-"
    if deviation is None:
        return format_number(column, mean)
    between = r" $\pm$ " if form == "latex" else " ± "
    return f"{format_number(column, mean)}{between}{format_number(column, deviation)}"


def compare_table(
    results: Sequence[Record],
    form: str = "text",
    all_columns: bool = False,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    traffic: bool = False,
    extra_columns: Sequence[str] = (),
    chance: bool = False,
) -> str:
    """One row per run, in per cent; `every` adds the columns per domain or client.

    `traffic` adds the exchanges of a client and its kilobytes up and down over all of them.
    `asked` are names of columns, and settings by dotted names, which follow the method.
    `paper` has what was published, by row and column; its numbers stand below ours.
    `chance` begins with what guessing would give.
    CSV and JSON have the numbers behind it, one line per seed, training, client and metric.
    """
    if form not in TABLE_FORMS:
        raise unknown_name("table form", form, TABLE_FORMS)
    if not results:
        raise SettingsError("no run is named; give one or more run directories")
    if form in long.TIDY_FORMS:
        return long.tidy_table(results, form, extra_columns)
    head, body = table_cells(results, form, all_columns, paper, traffic, extra_columns, chance)
    footnotes = [
        f"{run_label(result)}: {w}\n"
        for result in results
        for w in (*result.outlier_warnings, *result.convergence_warnings)
    ]
    if footnotes and form == "markdown":
        footnotes.insert(0, "\n")  # or the words would be one more row
    return render_table(head, body, form) + "".join(footnotes if form != "latex" else ())


def table_cells(
    results: Sequence[Record],
    form: str = "text",
    all_columns: bool = False,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    traffic: bool = False,
    extra_columns: Sequence[str] = (),
    chance: bool = False,
) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of that table."""
    names, settings = split_requested(results, extra_columns)
    column_statistics = [metrics.mean_and_std(result.tables) for result in results]
    columns = list(dict.fromkeys(key for run_statistics in column_statistics for key in run_statistics))
    if not all_columns and (main := [key for key in columns if key in MAIN_COLUMNS]):
        columns = main
    fraction_columns = list(columns)
    for result, run_statistics in zip(results, column_statistics, strict=True):
        extra_statistics = metrics.mean_and_std(compute_columns(result, names))
        run_statistics |= extra_statistics
        columns += [key for key in extra_statistics if key not in columns]
    last = [*(TRAFFIC_COLUMNS if traffic else ()), "seeds"]
    head = ["method", *settings, *columns, *last]
    dashes = ["-" for _ in settings]
    body = []
    if chance:
        chance_by_column = dict(zip(fraction_columns, chance_cells(results[0], fraction_columns, form), strict=True))
        cells = [chance_by_column.get(key, format_cell(None, None, form)) for key in columns]
        body.append(["chance", *dashes, *cells, *("-" for _ in last)])
    for result, run_statistics in zip(results, column_statistics, strict=True):
        cells = [format_cell(*run_statistics.get(key, (None, None)), form, key) for key in columns]
        exchanges, moved = result.traffic if traffic else (0, 0.0)
        traffic_cells = [f"{exchanges}", f"{moved / 1000:.1f}"] if traffic else []
        before = [run_label(result, settings), *(setting_text(result, name) for name in settings)]
        body.append([*before, *cells, *traffic_cells, f"{len(result.tables)}"])
    for name, numbers in (paper or {}).items():
        cells = [f"{numbers[key]:.2f}" if key in numbers else "-" for key in columns]
        body.append([f"published: {name}", *dashes, *cells, *("-" for _ in last)])
    return head, body


def table_rows(results: Sequence[Record], extra_columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The same table as numbers, shares of one: each column's mean and deviation over seeds."""
    names, settings = split_requested(results, extra_columns)
    out = []
    for result in results:
        column_statistics = metrics.mean_and_std(result.tables) | metrics.mean_and_std(compute_columns(result, names))
        columns = {key: {"mean": mean, "deviation": by} for key, (mean, by) in column_statistics.items()}
        exchanges, moved = result.traffic
        end = {"exchanges": exchanges, "kB per client": moved / 1000, "seeds": len(result.tables)}
        run_columns = {"method": run_label(result, settings), **settings_of(result, settings)}
        out.append({**run_columns, **columns, **end})
    return out


def chance_cells(result: Record, columns: Sequence[str], form: str) -> list[str]:
    """One in as many as there are classes, where a column is a share of hits."""
    chance = 1 / len(result.manifest["classes"])
    non_accuracy_columns = {f"{group} {name}" for name in METRICS[1:] for group in ("clients", "target")}
    is_accuracy = [key not in non_accuracy_columns and not key.startswith("deviation ") for key in columns]
    return [format_cell(chance if hit else None, None, form) for hit in is_accuracy]


def render_table(head: Sequence[str], body: Sequence[Sequence[str]], form: str, align_left: bool = False) -> str:
    """A table; its columns after the first are numbers, set to the right, unless they are words."""
    if form == "latex":

        def escape(text: str) -> str:
            return text.replace("_", r"\_").replace("%", r"\%").replace("&", r"\&")

        lines = [" & ".join(map(escape, row)) + r" \\" for row in (head, *body)]
        opening = rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}"
        rows = [opening, r"\hline", lines[0], r"\hline", *lines[1:], r"\hline", r"\end{tabular}", ""]
        return "\n".join(rows)
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        set_to = str.ljust if align_left else str.rjust
        cells += [set_to(text, width) for text, width in zip(row[1:], widths[1:], strict=True)]
        return f"| {' | '.join(cells)} |" if form == "markdown" else "  ".join(cells).rstrip()

    rule = ["-" * width for width in widths]
    if form == "markdown":
        rule = [rule[0], *(f"{dashes[:-1]}:" for dashes in rule[1:])]
    return "\n".join([line(head), line(rule), *map(line, body), ""])
