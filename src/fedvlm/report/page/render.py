"""Render the model of runs as one HTML file that needs no network."""

import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fedvlm.evaluate.metrics import METRICS, mean_and_std
from fedvlm.record import Record
from fedvlm.report import charts
from fedvlm.report.charts import BubbleChart, Chart, Series
from fedvlm.report.page.model import FEDERATED, build_model, run_kind
from fedvlm.report.page.svg import draw_bubbles, draw_chart, draw_outliers, draw_positions, line_class
from fedvlm.report.runs import Model, differing_settings, model_json
from fedvlm.report.subgroups import subgroup_cells, subgroup_charts
from fedvlm.report.tables import AUDIT_COLUMNS, format_cell
from fedvlm.storage.files import CHECKSUM_KEY, flatten, write_file

if TYPE_CHECKING:
    from jinja2 import Template

Run = Mapping[str, Any]
MAX_SHOWN = 40  # clients or classes that a drawing has room for
MAX_WEIGHTS = 40  # sentences in the chart of their weights
ROUND_CHARTS = (  # key of the curve, title, whether it is a fraction
    ("accuracy", "Accuracy of the clients that train", True),
    ("unseen", "Accuracy of unseen clients", True),
    ("clients F1", "Macro-F1 of the clients that train", True),
    ("clients balanced", "Balanced accuracy of the clients that train", True),
    ("loss", "Loss on validation samples", False),
    ("cosine", "Cosine similarity of the clients' updates", False),
)
DIAGNOSTIC_NAMES = {"condition number": "condition number κ", "gamma": "γ, fraction of an image that prompts take"}


def write_page(records: Sequence[Record], out: Path, title: str = "") -> Path:
    """Write one page of all these runs."""
    return write_model(build_model(records, title), out)


def write_model(model: Model, out: Path) -> Path:
    write_file(out, render_page(model).encode())
    return out


def render_page(model: Model) -> str:
    """Render a model; the functions that the template calls are passed to it by name."""
    sections: list[Callable[[Model], Any]] = [partitions, matrices, client_chart, client_gains, confusion]
    sections += [round_figures, calibration_figures, diagnostic_figures, subgroup_figures]
    return open_template("report.html").render(
        audit_columns=AUDIT_COLUMNS,
        **page_shell(),
        **{section.__name__: section(model) for section in sections},
        model=model,
        data=embed_model(model),
        rows=main_table_rows(model),
        settings=settings_table(model),
    )


def open_template(name: str, package: str = "fedvlm.report.page") -> "Template":
    """Open a template beside the templates of pages; `package` holds it, if it is none of those."""
    from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined

    loaders = [FileSystemLoader(str(files(package))), PackageLoader("fedvlm.report.page", "templates")]
    options: dict[str, Any] = {
        "autoescape": True,
        "undefined": StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    env = Environment(loader=ChoiceLoader(loaders), **options)
    env.globals.update(colour=line_class, draw_outliers=draw_outliers, diagnostic_names=DIAGNOSTIC_NAMES)
    env.filters.update(subgroup_cells=subgroup_cells)
    env.filters.update(percent=format_percent, shade=shade_class, digits=four_digits, bytes=format_bytes)
    return env.get_template(name)


def page_shell(script: str = "", more_style: str = "", extra_policy: str = "") -> dict[str, Any]:
    """Return style, script and a policy that lets nothing else in; a page may have another script and a rule more."""
    style = _read_static("style.css") + more_style
    script = script or _read_static("script.js")
    policy = (
        f"default-src 'none'; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}; "
        f"img-src data:; base-uri 'none'; form-action 'none'{'; ' * bool(extra_policy)}{extra_policy}"
    )
    return {"style": Markup(style), "script": Markup(script), "policy": policy}


def _read_static(name: str) -> str:
    text = (files("fedvlm.report.page") / "static" / name).read_text("utf-8")
    assert "</" not in text, f"{name} would end its own element"
    return text


def _csp_hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def embed_model(model: Model) -> Markup:
    """Return JSON that no name in it can break out of, with a checksum of its content."""
    plain = model_json({**model, CHECKSUM_KEY: sha256(model_json(model).encode()).hexdigest()})
    for letter in "<>&":
        plain = plain.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(plain)


def format_percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def four_digits(value: float | None) -> str:
    """Format a number with at most four digits, large ones in thousands, millions or billions."""
    if value is None:
        return "-"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


def format_bytes(value: float) -> str:
    """Format a number of bytes with at most four digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.4g} {unit}"


def shade_class(value: float | None) -> str:
    """Return the class of one of eleven shades."""
    return "" if value is None else f"h{max(0, min(10, round(10 * value)))}"


def main_table_rows(model: Model) -> list[dict[str, Any]]:
    """Return rows of cells: the text, the number to sort by, and the difference to the best."""
    out = []
    for place, run in enumerate(model["runs"]):
        statistics = mean_and_std(run["tables"]) | run.get("beside", {})
        cells = []
        for column in [*model["columns"], *model.get("beside", ())]:
            mean, std = statistics.get(column, (None, None))
            verdict = model["verdicts"].get(column)
            cell: dict[str, Any] = {"text": format_cell(mean, std, "text", column), "sort": mean, "mark": ""}
            if verdict and place == verdict["best"]:
                cell["mark"] = "best"
            elif verdict and (gap := verdict["differences"].get(str(place))):
                cell["mark"] = "n.s." if place in verdict["similar"] else ""
                cell["gap"] = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * part for part in gap))
            cells.append(cell)
        out.append({"place": place, "run": run, "cells": cells})
    return out


def settings_table(model: Model) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ, with their values."""
    flat = [flatten(run["identity"]) for run in model["runs"]]

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    keys = differing_settings(flat)
    return [(key, [text(settings[key]) if key in settings else "-" for settings in flat]) for key in keys]


def partitions(model: Model) -> list[dict[str, Any]]:
    """Return samples per client and class, once for runs that share them."""
    out: dict[str, dict[str, Any]] = {}
    for run in model["runs"]:
        if run["rows"] in out:
            continue
        counts = run["counts"] or {}
        ids = sorted(run["clients"], key=lambda id: -run["clients"][id]["train"])
        shown = [id for id in ids if id in counts][:MAX_SHOWN]
        classes = run["classes"][: 2 * MAX_SHOWN]
        chart = BubbleChart(run["data"], [counts[id][: 2 * MAX_SHOWN] for id in shown], shown, classes)
        out[run["rows"]] = {
            "data": run["data"],
            "drawing": draw_bubbles(chart) if shown else "",
            "hidden": [len(ids) - len(shown), len(run["classes"]) - len(classes)],
            "clients": [
                {"client": id, **run["clients"][id], "classes": sum(map(bool, counts.get(id, [])))}
                for id in ids[: 2 * MAX_SHOWN]
            ],
            "dropped": max((run["duplicates_dropped"] or {"": 0}).values()),
        }
    return list(out.values())


def matrices(model: Model) -> list[dict[str, Any]]:
    """Return, by run, the accuracy on every client's test samples in every training, mean over seeds."""
    out = []
    for place, run in enumerate(model["runs"]):
        accuracies: dict[tuple[str, str], list[float]] = {}
        by_client: dict[str, list[float]] = {}
        for cell in run["cells"]:
            accuracies.setdefault((cell["training"], cell["client"]), []).append(cell["accuracy"])
            by_client.setdefault(cell["client"], []).append(cell["accuracy"])
        members = next(iter(run["members"].values()))  # of cross-device those of the first seed
        worst = sorted(by_client, key=lambda id: fmean(by_client[id]))[:MAX_SHOWN]
        ids = [id for id in by_client if id in worst]
        rows = []
        for training, (_, unseen) in members.items():
            values = [accuracies.get((training, id)) for id in ids]
            means = [None if value is None else fmean(value) for value in values]
            rows.append((training, [(mean, id in unseen) for mean, id in zip(means, ids, strict=True)]))
        shown = {"run": place, "name": run["name"], "clients": ids, "hidden": len(by_client) - len(ids), "rows": rows}
        out.append(shown | _client_summary(run))
    return out


def client_means(run: Run, key: str = "accuracy") -> dict[str, float]:
    """Return a metric of each client that trained, the mean over trainings and seeds."""
    values_by_client: dict[str, list[float]] = {}
    for cell in run["cells"]:
        if not cell["unseen"] and key in cell:
            values_by_client.setdefault(cell["client"], []).append(cell[key])
    return {id: fmean(values) for id, values in values_by_client.items()}


def _client_summary(run: Run) -> dict[str, Any]:
    accuracies = client_means(run)
    if not accuracies:
        return {"worst": None, "range": None, "metrics": {}}
    worst = min(accuracies, key=lambda id: accuracies[id])
    metrics = {key: fmean(means.values()) for key in METRICS if (means := client_means(run, key))}
    span = max(accuracies.values()) - min(accuracies.values())
    return {"worst": (worst, accuracies[worst]), "range": span, "metrics": metrics}


def client_gains(model: Model) -> dict[str, Any] | None:
    """Return accuracies client by client: zero-shot, the best federated run, alone; the worst client first."""
    steps: list[tuple[str, dict[str, float]]] = []
    for kind, name in enumerate(("zero-shot", "federated", "alone")):
        runs = [(run["name"], client_means(run)) for run in model["runs"] if run_kind(run) == kind]
        candidates = [(fmean(means.values()), run_name, means) for run_name, means in runs if means]
        if candidates:
            _, run_name, means = max(candidates, key=lambda candidate: candidate[0])
            steps.append((run_name if kind == FEDERATED else name, means))
    if len(steps) < 2:
        return None
    federated = steps[1][1]
    ids = sorted(federated, key=lambda id: federated[id])
    rows = []
    for id in ids[:MAX_SHOWN]:
        values = [means.get(id) for _, means in steps]
        defined = [value for value in values if value is not None]
        rows.append((id, values, defined[1] - defined[0] if len(defined) > 1 else None))
    return {"names": [name for name, _ in steps], "rows": rows, "hidden": len(ids[MAX_SHOWN:])}


def client_chart(model: Model) -> dict[str, Any] | None:
    """Return a dot per client and run: zero-shot first, then federated, alone and pooled; the worst clients."""
    runs = sorted(model["runs"], key=run_kind)
    means = [client_means(run) for run in runs]
    ids = list(dict.fromkeys(id for by_client in means for id in by_client))
    if len(runs) < 2 or not ids:
        return None
    worst = sorted(ids, key=lambda id: min(by_client.get(id, 1.0) for by_client in means))[: MAX_SHOWN // 2]
    shown = [id for id in ids if id in worst]
    series = []
    for number, id in enumerate(shown):
        points = [(place, by_client[id]) for place, by_client in enumerate(means) if id in by_client]
        series.append(Series(id, points, number))
    names, title = [run["name"] for run in runs], "Accuracy of each client by method"
    chart = Chart(title, "", "accuracy (%)", series, kind="dots", categories=names, is_of_clients=True)
    return {"drawing": draw_chart(chart), "clients": shown, "hidden": len(ids) - len(shown)}


def confusion(model: Model) -> dict[str, Any] | None:
    """Return the confusion matrix of the best run, or of the first: true classes down, predicted across."""
    first = next(iter(model["verdicts"].values()), {"best": 0})
    run = model["runs"][first["best"]]
    group = "unseen" if "unseen" in run["calibration"] and run["tables"][0].get("G", 0) else "clients"
    cells = run["calibration"].get(group, {}).get("confusion")
    if not cells or len(run["classes"]) > MAX_SHOWN:
        return None
    grid = [[0] * len(run["classes"]) for _ in run["classes"]]
    for true, predicted, count in cells:
        grid[true][predicted] = count
    return {"run": run["name"], "group": group, "classes": run["classes"], "grid": grid}


def round_figures(model: Model) -> list[Markup]:
    """Draw curves over the rounds, then accuracies over the traffic of a client."""
    drawn = []
    for across, x_label in (("round", "round"), ("kB", "kB per client, both ways")):
        for key, title, is_fraction in ROUND_CHARTS:
            if across == "kB" and key not in ("accuracy", "unseen"):
                continue
            curves = [charts.mean_curve(run["curves"], key, across) for run in model["runs"]]
            named = enumerate(zip(model["runs"], curves, strict=True))
            series = [charts.with_band(run["name"], points, place) for place, (run, points) in named if points]
            if series:
                suffix = ", by traffic" if across == "kB" else ""
                y_label = "per cent" if is_fraction else key
                chart = Chart(title + suffix, x_label, y_label, series, is_percent=is_fraction, key=key, across=across)
                drawn.append(draw_chart(replace(chart, x_log=across == "kB")))
    return drawn


def calibration_figures(model: Model) -> dict[str, list[Markup]]:
    """Draw reliability, risk-coverage, ROC, precision-recall and decision curves of clients and unseen clients."""
    out = {}
    for group in ("clients", "unseen"):
        runs = [(place, run) for place, run in enumerate(model["runs"]) if group in run["calibration"]]
        summaries = {place: (run["name"], run["calibration"][group]) for place, run in runs}
        if not summaries:
            continue
        drawn = [charts.reliability_chart(summaries), charts.risk_chart(summaries)]
        ranked = {place: (name, summary) for place, (name, summary) in summaries.items() if "ROC" in summary}
        drawn += charts.ranking_charts(ranked) if ranked else []
        out[group] = [draw_chart(chart) for chart in (*drawn, charts.decision_chart(summaries))]
    return out


def subgroup_figures(model: Model) -> list[Markup]:
    """Draw the AUC of each subgroup and run with its interval."""
    tables = [(run["name"], run.get("subgroups") or {}) for run in model["runs"]]
    return [draw_chart(chart) for chart in subgroup_charts(tables)]


def diagnostic_figures(model: Model) -> list[Markup]:
    """Draw rotation angles of maps, weights of sentences, and local prompts on a plane."""
    angles, weights = [], []
    for place, run in enumerate(model["runs"]):
        if run["angles"]:
            points = [(k / (len(run["angles"]) - 1), angle) for k, angle in enumerate(run["angles"])]
            angles.append(Series(run["name"], points, place))
        if run["weights"]:
            ranked = [(float(k), weight) for k, weight in enumerate(run["weights"][:MAX_WEIGHTS], 1)]
            weights.append(Series(run["name"], ranked, place))
    drawn = []
    if angles:
        title = "Rotation angles of the clients' maps"
        drawn.append(draw_chart(Chart(title, "quantile", "degrees", angles, is_percent=False)))
    if weights:
        drawn.append(draw_chart(Chart("Weights of a class's sentences, largest first", "rank", "weight (%)", weights)))
    for run in model["runs"]:
        if prompts := run["prompts"]:
            title = f"Local prompts of {run['name']} (t-SNE: similar prompts are close)"
            drawn.append(draw_positions(title, prompts["places"], prompts["clients"]))
    return drawn
