"""Tabulate runs: mean ± standard deviation as text, Markdown or LaTeX, tidy rows as CSV or JSON, data frames."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedvlm.errors import SettingsError, unknown_name
from fedvlm.evaluate.metrics import METRICS, mean_and_std, metrics
from fedvlm.plugins import require
from fedvlm.record import AUDIT_FILE, Record
from fedvlm.report.columns import compute_columns, format_number, setting_text, settings_of, split_requested
from fedvlm.report.runs import has_unseen_scores, read_trainings, run_label
from fedvlm.storage.files import read_json, write_json

TIDY_FORMS = ("csv", "json")
TABLE_FORMS = ("text", "markdown", "latex", *TIDY_FORMS)
TRAFFIC_COLUMNS = ("rounds", "kB per client")
# what a table shows first; the rest is per client
MAIN_COLUMNS = {"G", "P", "C", "own", "own classes only", "global", "average"}
MAIN_COLUMNS |= {f"{group} {name}" for name in METRICS for group in ("clients", "target")}


def format_cell(mean: float | None, deviation: float | None, form: str, column: str = "") -> str:
    if mean is None:
        return "-"
    if deviation is None:
        return format_number(column, mean)
    between = r" $\pm$ " if form == "latex" else " ± "
    return f"{format_number(column, mean)}{between}{format_number(column, deviation)}"


def compare_table(
    results: Sequence[Record], form: str = "text", extra_columns: Sequence[str] = (), **options: Any
) -> str:
    """Return a table with a row per run, in per cent, or its numbers in tidy form as CSV or JSON.

    `options` are those of `table_cells`.
    """
    if form not in TABLE_FORMS:
        raise unknown_name("table form", form, TABLE_FORMS)
    if not results:
        raise SettingsError("no run is named; give one or more run directories")
    if form in TIDY_FORMS:
        return tidy_table(results, form, extra_columns)
    head, body = table_cells(results, form, extra_columns, **options)
    warnings = [(run_label(run), (*run.outlier_warnings, *run.convergence_warnings)) for run in results]
    footnotes = [f"{label}: {warning}\n" for label, of_run in warnings for warning in of_run]
    if footnotes and form == "markdown":
        footnotes.insert(0, "\n")  # or they would be a row of the table
    return render_table(head, body, form) + "".join(footnotes if form != "latex" else ())


def table_cells(
    results: Sequence[Record],
    form: str = "text",
    extra_columns: Sequence[str] = (),
    all_columns: bool = False,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    traffic: bool = False,
    chance: bool = False,
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table.

    `all_columns` adds those per domain or client, `traffic` the communication rounds and kilobytes of a client,
    `extra_columns` further ones and settings by dotted names. `paper` has published numbers by row and column, which
    stand below ours; `chance` adds a row of random guessing.
    """
    names, settings = split_requested(results, extra_columns)
    column_statistics = [mean_and_std(result.tables) for result in results]
    columns = list(dict.fromkeys(key for run_statistics in column_statistics for key in run_statistics))
    if not all_columns and (main := [key for key in columns if key in MAIN_COLUMNS]):
        columns = main
    fraction_columns = list(columns)
    for result, run_statistics in zip(results, column_statistics, strict=True):
        extra_statistics = mean_and_std(compute_columns(result, names))
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
        rounds, moved = result.traffic if traffic else (0, 0.0)
        traffic_cells = [f"{rounds}", f"{moved / 1000:.1f}"] if traffic else []
        before = [run_label(result, settings), *(setting_text(result, name) for name in settings)]
        body.append([*before, *cells, *traffic_cells, f"{len(result.tables)}"])
    for name, numbers in (paper or {}).items():
        cells = [f"{numbers[key]:.2f}" if key in numbers else "-" for key in columns]
        body.append([f"published: {name}", *dashes, *cells, *("-" for _ in last)])
    return head, body


def _run_row(result: Record, names: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """Return label, settings, (mean, std) of every column, seeds and traffic of a run."""
    rounds, moved = result.traffic
    statistics = mean_and_std(result.tables) | mean_and_std(compute_columns(result, names))
    row = {"method": run_label(result, settings), **settings_of(result, settings), "seeds": len(result.tables)}
    return {**row, **statistics, **dict(zip(TRAFFIC_COLUMNS, (rounds, moved / 1000), strict=True))}


def table_rows(results: Sequence[Record], extra_columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the table as numbers, accuracies as fractions: each column's mean and standard deviation over seeds."""
    names, settings = split_requested(results, extra_columns)

    def plain(value: Any) -> Any:
        return {"mean": value[0], "std": value[1]} if isinstance(value, tuple) else value

    rows = [_run_row(result, names, settings) for result in results]
    return [{key: plain(value) for key, value in row.items()} for row in rows]


def chance_cells(result: Record, columns: Sequence[str], form: str) -> list[str]:
    """Return the accuracy of random guessing, where a column is an accuracy over all classes."""
    chance = 1 / (2 if result.manifest.get("multi_label") else len(result.manifest["classes"]))
    other_columns = {f"{group} {name}" for name in METRICS[1:] for group in ("clients", "target")}
    other_columns |= {"own classes only"}
    is_accuracy = [key not in other_columns and not key.startswith("deviation ") for key in columns]
    return [format_cell(chance if applies else None, None, form) for applies in is_accuracy]


def render_table(head: Sequence[str], body: Sequence[Sequence[str]], form: str, align_left: bool = False) -> str:
    """Render a table; columns after the first are numbers and set to the right unless `align_left`."""
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


TIDY_COLUMNS = ("method", "data", "seed", "training", "client", "unseen", "rows", "metric", "value")
DECIMALS = 7  # as a page keeps them


def client_scores(result: Record) -> Iterator[dict[str, Any]]:
    """Yield every seed, training and client that has test samples, with all its metrics."""
    for seed in result.manifest["identity"]["seeds"]:
        for training, about in read_trainings(result, seed).items():
            unseen_ids = about["unseen"] if has_unseen_scores(result) else []
            for id, client in about["scores"].items():
                if not client["test_rows"] or id not in (*about["train"], *unseen_ids):
                    continue
                numbers = {key: client.get(key) for key in metrics()}
                numbers["accuracy"] = client["test_hits"] / client["test_rows"]
                place = {"seed": seed, "training": training, "client": id, "unseen": id in unseen_ids}
                yield {**place, "rows": client["test_rows"], **numbers}


def tidy_rows(results: Sequence[Record], extra_columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a row per seed, training, client and metric, accuracies as fractions; extra columns have one per seed."""
    names, settings = split_requested(results, extra_columns)
    nobody = dict.fromkeys(("training", "client", "unseen", "rows"))
    out = []
    for result in results:
        run = {"method": run_label(result, settings), **settings_of(result, settings)}
        run["data"] = result.manifest["data"]
        for client_row in client_scores(result):
            row = {**run, **{key: client_row[key] for key in TIDY_COLUMNS[2:-2]}}
            for name in metrics():
                if client_row[name] is not None:
                    out.append({**row, "metric": name, "value": round(client_row[name], DECIMALS)})
        seeds = result.manifest["identity"]["seeds"]
        for seed, table in zip(seeds, compute_columns(result, names), strict=True):
            for name, value in table.items():
                if value is not None:
                    row = {**run, "seed": seed, **nobody}
                    out.append({**row, "metric": name, "value": round(value, DECIMALS)})
    return out


def tidy_table(results: Sequence[Record], form: str, extra_columns: Sequence[str] = ()) -> str:
    """Return tidy rows as CSV or JSON; requested settings follow the method."""
    settings = split_requested(results, extra_columns)[1]
    return serialise(tidy_rows(results, extra_columns), (TIDY_COLUMNS[0], *settings, *TIDY_COLUMNS[1:]), form)


def serialise(rows: Sequence[Mapping[str, Any]], head: Sequence[str], form: str) -> str:
    """Write rows as CSV or JSON."""
    if form == "json":
        return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
    out = io.StringIO()
    table = csv.DictWriter(out, head, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return out.getvalue()


def _pandas() -> Any:
    return require("pandas", "a data frame needs pandas", "frame")


def scores_frame(result: Record) -> Any:
    """Return a data frame with a row per seed, training and client that has test samples, and a column per metric."""
    return _pandas().DataFrame(list(client_scores(result)))


def comparison_frame(results: Sequence[Record], extra_columns: Sequence[str] = ()) -> Any:
    """Return a data frame with a row per run: the mean over seeds of every column, and its standard deviation.

    `extra_columns` are further columns and settings, as `compare --columns` takes them.
    """
    pandas = _pandas()
    if not results:
        raise SettingsError("no run is named; give one or more runs")
    names, settings = split_requested(results, extra_columns)
    rows = []
    for result in results:
        row: dict[str, Any] = {}
        for key, value in _run_row(result, names, settings).items():
            row |= {key: value[0], f"{key} std": value[1]} if isinstance(value, tuple) else {key: value}
        rows.append(row)
    return pandas.DataFrame(rows).set_index("method")


AUDIT_COLUMNS = ["AUC upload", "AUC span", "AUC span of sum", "recovered", "recovered from sum"]
AUDIT_COLUMNS += ["AUC shared", "AUC personal"]


def write_audit(result: Record, lines: list[dict[str, Any]]) -> None:
    """Write an audit into the run's folder; it replaces an earlier one."""
    write_json(result.folder / AUDIT_FILE, {"lines": lines})


def read_audit(result: Record) -> list[dict[str, Any]]:
    """Return the audit in the run's folder, empty if there is none."""
    path = result.folder / AUDIT_FILE
    return list(read_json(path)["lines"]) if path.exists() else []


def audit_table(lines: list[dict[str, Any]], form: str = "text") -> str:
    """Tabulate an audit: the fields of an upload, then what it reveals of each client."""
    if not lines:
        return "nothing is uploaded\n"
    fields = {(line["exchange"], key): field for line in lines for key, field in line["fields"].items()}
    shown = {place: (f"{of['dtype']} {tuple(of['shape'])}", f"{of['bytes']}") for place, of in fields.items()}
    first = [[*place, *texts] for place, texts in shown.items()]
    names = ["client", "exchange", "bytes", "classes", "smallest class"]

    def cell(value: Any) -> str:
        return "not measured" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    body = []
    for line in lines:
        epsilon = "inf" if line["epsilon"] is None else cell(line["epsilon"])
        body.append([*(cell(line.get(key)) for key in (*names, *AUDIT_COLUMNS)), epsilon])
    fields_table = render_table(["exchange", "field", "what", "bytes"], first, form, align_left=True)
    return f"{fields_table}\n{render_table([*names, *AUDIT_COLUMNS, 'ε'], body, form)}"
