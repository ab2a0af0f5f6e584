"""The model as one HTML file."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup, escape

from fedvlm.evaluate import metrics
from fedvlm.evaluate.metrics import METRICS
from fedvlm.record import Record
from fedvlm.report.page.model import OutlierHistory, build_model
from fedvlm.report.page.svg import Line, Panel, bubble_chart, line_class, scatter_chart, slopegraph, svg_text
from fedvlm.report.runs import Model, model_json
from fedvlm.report.tables import format_cell
from fedvlm.storage.files import CHECKSUM_KEY, flatten, write_file


def write_page(
    records: Sequence[Record],
    out: Path,
    title: str = "",
    paper: Mapping[str, Mapping[str, float]] | None = None,
    command: str = "",
) -> Path:
    """One page of all these runs."""
    return write_model(build_model(records, title, paper, command), out)


def write_model(model: Model, out: Path) -> Path:
    write_file(out, render_page(model).encode())
    return out


def render_page(model: Model) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fedvlm.report.page", "templates")
    env = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals.update(colour=line_class)
    env.filters.update(percent=format_percent, heat=shade_class)
    return env.get_template("report.html").render(
        **page_shell(),
        model=model,
        data=embed_model(model),
        rows=main_table_rows(model),
        partitions=partitions,
        matrices=matrices,
        client_slopes=client_slopes,
        journeys=journeys,
        confusion=confusion,
        round_figures=round_figures,
        calibration_figures=calibration_figures,
        diagnostic_figures=diagnostic_figures,
        draw_outliers=draw_outliers,
        odd=differing_settings(model),
    )


def page_shell(script: str = "", more_style: str = "", extra_policy: str = "") -> dict[str, Any]:
    """What every page of ours has: style, script, and a policy that lets nothing else in.

    A page may have another script, and a rule more.
    """
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
    """JSON that no name in it can break out of, with a checksum of all that it says."""
    plain = model_json({**model, CHECKSUM_KEY: sha256(model_json(model).encode()).hexdigest()})
    for letter in "<>&":
        plain = plain.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(plain)


def format_percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def shade_class(value: float | None) -> str:
    """One of eleven shades."""
    return "" if value is None else f"h{max(0, min(10, round(10 * value)))}"


def main_table_rows(model: Model) -> list[dict[str, Any]]:
    """The table's rows: per column the words, the number to sort by, and what it is to the best."""
    out = []
    for place, run in enumerate(model["runs"]):
        spread = metrics.mean_and_std(run["tables"])
        cells = []
        for column in model["columns"]:
            mean, deviation = spread.get(column, (None, None))
            verdict = model["verdicts"].get(column)
            table_cell: dict[str, Any] = {"text": format_cell(mean, deviation, "text"), "sort": mean, "mark": ""}
            if verdict and place == verdict["best"]:
                table_cell["mark"] = "best"
            elif verdict and (gap := verdict["differences"].get(str(place))):
                table_cell["mark"] = "level" if place in verdict["level"] else ""
                table_cell["gap"] = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * part for part in gap))
            cells.append(table_cell)
        out.append({"place": place, "run": run, "cells": cells})
    return out


def differing_settings(model: Model) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ from each other."""
    identities = [
        {
            key: setting if isinstance(setting, str) else json.dumps(setting)
            for key, setting in flatten(identity).items()
        }
        for identity in (run["identity"] for run in model["runs"])
    ]
    keys = dict.fromkeys(key for setting in identities for key in setting)
    texts_by_key = {key: [setting.get(key, "-") for setting in identities] for key in keys}
    return [(key, texts) for key, texts in texts_by_key.items() if len(set(texts)) > 1]


Run = Mapping[str, Any]
MAX_SHOWN = 40  # clients or classes that a drawing has room for


def partitions(model: Model) -> list[dict[str, Any]]:
    """Who has which rows, once for runs that share them."""
    out: dict[str, dict[str, Any]] = {}
    for run in model["runs"]:
        if run["rows"] in out:
            continue
        counts = run["counts"] or {}
        ids = sorted(run["clients"], key=lambda id: -run["clients"][id]["train"])
        shown_ids = [id for id in ids if id in counts][:MAX_SHOWN]
        classes = run["classes"][: 2 * MAX_SHOWN]
        grid = [counts[id][: 2 * MAX_SHOWN] for id in shown_ids]
        out[run["rows"]] = {
            "data": run["data"],
            "drawing": bubble_chart(grid, shown_ids, classes) if shown_ids else "",
            "left": [len(ids) - len(shown_ids), len(run["classes"]) - len(classes)],
            "clients": [
                {"client": id, **run["clients"][id], "classes": sum(map(bool, counts.get(id, [])))}
                for id in ids[: 2 * MAX_SHOWN]
            ],
            "dropped": max((run["duplicates_dropped"] or {"": 0}).values()),
        }
    return list(out.values())


def matrices(model: Model) -> list[dict[str, Any]]:
    """By run: the accuracy on every client's test rows in every training, mean over seeds."""
    out = []
    for place, run in enumerate(model["runs"]):
        means: dict[tuple[str, str], list[float]] = {}
        for cell in run["cells"]:
            means.setdefault((cell["training"], cell["client"]), []).append(cell["accuracy"])
        ids = list(dict.fromkeys(cell["client"] for cell in run["cells"]))
        members = next(iter(run["who"].values()))  # of cross-device those of the first seed
        unseen = {(training, id) for training, (_, unseen_ids) in members.items() for id in unseen_ids}
        accuracies = {id: [fmean(v) for (_, client_id), v in means.items() if client_id == id] for id in ids}
        shown_ids = sorted(ids, key=lambda id: fmean(accuracies[id]))[:MAX_SHOWN]
        rows = [
            (
                training,
                [
                    (
                        fmean(means[training, id]) if (training, id) in means else None,
                        (training, id) in unseen,
                    )
                    for id in ids
                    if id in shown_ids
                ],
            )
            for training in members
        ]
        out.append(
            {
                "run": place,
                "name": run["name"],
                "clients": [id for id in ids if id in shown_ids],
                "left": len(ids) - len(shown_ids),
                "rows": rows,
                **_spread(run),
            }
        )
    return out


def client_means(run: Run, key: str = "accuracy") -> dict[str, float]:
    """A number of each client that trained, the mean over trainings and seeds."""
    values_by_client: dict[str, list[float]] = {}
    for cell in run["cells"]:
        if not cell["unseen"] and key in cell:
            values_by_client.setdefault(cell["client"], []).append(cell[key])
    return {id: fmean(values) for id, values in values_by_client.items()}


def _spread(run: Run) -> dict[str, Any]:
    accuracies = client_means(run)
    if not accuracies:
        return {"worst": None, "spread": None, "metrics": {}}
    worst = min(accuracies, key=lambda id: accuracies[id])
    metrics = {key: fmean(means.values()) for key in METRICS if (means := client_means(run, key))}
    return {
        "worst": (worst, accuracies[worst]),
        "spread": max(accuracies.values()) - min(accuracies.values()),
        "metrics": metrics,
    }


KINDS = {"zero-shot": 0, "alone": 2, "fedot-all-local": 2, "pooled": 3}  # all others are federated


def journeys(model: Model) -> dict[str, Any] | None:
    """Client by client: zero-shot, the federated run of the best mean, alone; the worst first."""
    kinds = [KINDS.get(run["identity"]["method"]["name"], 1) for run in model["runs"]]
    steps: list[tuple[str, dict[str, float]]] = []
    for kind, name in enumerate(("zero-shot", "federated", "alone")):
        runs_of_kind = [run for run, run_kind in zip(model["runs"], kinds, strict=True) if run_kind == kind]
        candidates = [
            (fmean(accuracies.values()), run["name"], accuracies)
            for run in runs_of_kind
            if (accuracies := client_means(run))
        ]
        if candidates:
            _, run, accuracies = max(candidates, key=lambda run_kind: run_kind[0])
            steps.append((run if kind == 1 else name, accuracies))
    if len(steps) < 2:
        return None
    federated = next((accuracies for place, (_, accuracies) in enumerate(steps) if place), {})
    ids = sorted(federated, key=lambda id: federated[id])
    rows = []
    for id in ids[:MAX_SHOWN]:
        values = [accuracies.get(id) for _, accuracies in steps]
        defined = [value for value in values if value is not None]
        rows.append((id, values, defined[1] - defined[0] if len(defined) > 1 else None))
    return {"names": [name for name, _ in steps], "rows": rows, "left": len(ids[MAX_SHOWN:])}


def client_slopes(model: Model) -> Markup:
    """Zero-shot first, then what was federated, then what clients reach alone."""
    runs = sorted(model["runs"], key=lambda run: KINDS.get(run["identity"]["method"]["name"], 1))
    accuracies_by_run = [client_means(run) for run in runs]
    ids = list(dict.fromkeys(id for accuracies in accuracies_by_run for id in accuracies))
    if len(runs) < 2 or not ids:
        return Markup("")
    worst = sorted(ids, key=lambda id: min(accuracies.get(id, 1.0) for accuracies in accuracies_by_run))[
        : MAX_SHOWN // 2
    ]
    lines = [(id, [accuracies.get(id) for accuracies in accuracies_by_run]) for id in ids if id in worst]
    return slopegraph([run["name"] for run in runs], lines)


def confusion(model: Model) -> dict[str, Any] | None:
    """Of the run that leads, or the first: true classes down, answers across, in per cent."""
    first = next(iter(model["verdicts"].values()), {"best": 0})
    run = model["runs"][first["best"]]
    kind = "unseen" if "unseen" in run["sure"] and run["tables"][0].get("G", 0) else "clients"
    cells = run["sure"].get(kind, {}).get("confusion")
    if not cells or len(run["classes"]) > MAX_SHOWN:
        return None
    grid = [[0] * len(run["classes"]) for _ in run["classes"]]
    for true, guess, rows in cells:
        grid[true][guess] = rows
    return {"run": run["name"], "kind": kind, "classes": run["classes"], "grid": grid}


MAX_WEIGHTS = 40  # places of a drawing of weights
UNIT_RANGE = (0.0, 1.0)
PANELS = (  # key of the curve, what it is called, whether it is a share
    ("accuracy", "accuracy of the clients that train", True),
    ("unseen", "accuracy of unseen clients", True),
    ("clients F1", "macro-F1 of the clients that train", True),
    ("clients balanced", "balanced accuracy of the clients that train", True),
    ("loss", "loss on validation rows", False),
    ("cosine", "agreement of the clients' updates (cosine)", False),
)


def round_figures(model: Model) -> list[Markup]:
    """Curves over the rounds, then the same against what a client has moved."""
    out = []
    for key, name, is_fraction in PANELS:
        for across, x in (("round", "round"), ("kB", "kilobytes of a client, both ways")):
            if across == "kB" and key not in ("accuracy", "unseen"):
                continue
            lines = [
                line
                for place, run in enumerate(model["runs"])
                if (line := average(place, run["curves"], key, across)).points
            ]
            if lines:
                by = "" if across == "round" else ", by traffic"
                unit = "%" if is_fraction else key
                log = across == "kB"
                out.append(Panel(name + by, x, unit, lines, log, is_fraction, key=key, across=across))
    ordered = sorted(out, key=lambda panel: panel.across == "kB")
    return [_figure(panel) for panel in ordered]


def average(place: int, curves: Sequence[Mapping[str, Any]], key: str, across: str = "round") -> Line:
    """Mean over trainings and seeds, and a band of a deviation over seeds."""
    by_seed: dict[int, list[Mapping[str, Any]]] = {}
    for curve in curves:
        if key in curve:
            by_seed.setdefault(curve["seed"], []).append(curve)
    length = min((len(curve["kB"]) for seed_curves in by_seed.values() for curve in seed_curves), default=0)
    points, band = [], []
    for number in range(length):
        means = []
        for seed_curves in by_seed.values():
            values = [curve[key][number] for curve in seed_curves if curve[key][number] is not None]
            if values:
                means.append(fmean(values))
        moved = fmean(curve["kB"][number] for seed_curves in by_seed.values() for curve in seed_curves)
        x = float(number) if across == "round" else moved
        if not means or (across == "kB" and not moved):  # there is no logarithm of nothing
            continue
        mean = fmean(means)
        points.append((x, mean))
        if len(means) > 1:
            wide = stdev(means)
            band.append((x, mean - wide, mean + wide))
    return Line(place, points, band)


def _figure(panel: Panel) -> Markup:
    return _framed(panel.name, panel.draw())


def _framed(name: str, drawing: Markup) -> Markup:
    return Markup("<figure><figcaption>{}</figcaption>{}</figure>").format(name, drawing)


def calibration_figures(model: Model) -> dict[str, list[Markup]]:
    """Reliability, risk and coverage, ROC, precision-recall, decision curve; by who was tested."""
    out = {}
    for kind in ("clients", "unseen"):
        summaries = {i: run["sure"][kind] for i, run in enumerate(model["runs"]) if kind in run["sure"]}
        if not summaries:
            continue
        full = {  # bins of a hundredth of the rows or more
            i: [
                (point, n / max(summary["bins"]))
                for point, n in zip(summary["reliability"], summary["bins"], strict=True)
                if 100 * n >= summary["rows"]
            ]
            for i, summary in summaries.items()
        }
        reliable = [
            Line(i, [p for p, _ in bin_points], dots=[n for _, n in bin_points]) for i, bin_points in full.items()
        ]
        panels = [
            _square(
                "reliability: how often it is right when it is sure",
                "confidence",
                "% right",
                reliable,
                diagonal=True,
            ),
            Panel(
                "risk and coverage: wrong answers if only the surest rows are answered",
                "share of rows answered",
                "% wrong",
                _lines(summaries, "risk"),
                x_range=UNIT_RANGE,
            ),
        ]
        if ranked := {i: summary for i, summary in summaries.items() if "ROC" in summary}:
            name, x = "ROC, every row with every class", "share of false alarms"
            panels.append(_square(name, x, "% found", _lines(ranked, "ROC"), diagonal=True))
            lines = _lines(ranked, "precision")
            panels.append(_square("precision and recall", "recall", "% precision", lines))
        lines = _lines(summaries, "decision")
        panels.append(Panel("decision curve", "threshold", "net benefit", lines, percent=False))
        out[kind] = [_figure(panel) for panel in panels]
    return out


def _lines(summaries: Mapping[int, Mapping[str, Any]], key: str) -> list[Line]:
    return [Line(i, summary[key]) for i, summary in summaries.items()]


def _square(name: str, x: str, y: str, lines: Sequence[Line], diagonal: bool = False) -> Panel:
    """Shares against shares, from none to all."""
    return Panel(name, x, y, lines, diagonal=diagonal, x_range=UNIT_RANGE, y_range=UNIT_RANGE)


def diagnostic_figures(model: Model) -> list[Markup]:
    """Angles by which maps turn, weights of sentences, and local prompts on a plane."""
    runs = list(enumerate(model["runs"]))
    turned = [
        Line(i, [(k / (len(run["angles"]) - 1), angle) for k, angle in enumerate(run["angles"])])
        for i, run in runs
        if run["angles"]
    ]
    weights = [
        Line(i, [(float(k), weight) for k, weight in enumerate(run["weights"][:MAX_WEIGHTS], 1)])
        for i, run in runs
        if run["weights"]
    ]
    out = []
    if turned:
        name = "angles by which the clients' maps turn"
        out.append(Panel(name, "share of the angles", "degrees", turned, percent=False))
    if weights:
        name = "weight of a class's sentences, largest first"
        out.append(Panel(name, "place", "% weight", weights))
    drawn = [_figure(panel) for panel in out]
    for _, run in runs:
        if prompt_map := run["prompts"]:
            name = f"local prompts of {run['name']}: near ones are alike (t-SNE)"
            drawn.append(_framed(name, scatter_chart(name, prompt_map["places"], prompt_map["clients"])))
    return drawn


MAX_CLIENTS = 40  # clients in a drawing; those that were far most often come first


def draw_outliers(about: OutlierHistory) -> Markup:
    """Clients down, rounds across."""
    rounds = about["rounds"]
    often = {id: sum(numbers[0] for numbers in by_round.values()) for id, by_round in about["clients"].items()}
    ids = sorted(often, key=lambda id: (-often[id], id))[:MAX_CLIENTS]
    cell, left_margin, top = min(16.0, max(3.0, 640 / len(rounds))), 150, 20
    width, height = left_margin + cell * len(rounds) + 60, top + 16 * len(ids) + 8
    out = Markup(
        f'<svg class="wide" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        'aria-label="who was far from the rest in which round">'
    )
    out += svg_text(left_margin, top - 6, f"round {rounds[0]} to {rounds[-1]}", "tick")
    for row, id in enumerate(ids):
        y = top + 16 * row
        out += svg_text(left_margin - 8, y + 11, id, "tick end")
        for place, number in enumerate(rounds):
            if (numbers := about["clients"][id].get(str(number))) is not None:
                x = left_margin + cell * place
                kind = "bubble" if numbers[0] else "band c7"
                out += Markup(f'<rect class="{kind}" x="{x:.1f}" y="{y}" ')
                out += Markup(f'width="{cell - 1:.1f}" height="14"><title>')
                out += escape(_tooltip(id, number, numbers)) + Markup("</title></rect>")
        out += svg_text(left_margin + cell * len(rounds) + 6, y + 11, f"{often[id]} far", "tick")
    return out + Markup("</svg>")


def _tooltip(id: str, number: int, numbers: Sequence[float | None]) -> str:
    words = ("times the median", "times those that point alike", "cosine to the others")
    parts = [f"{value:g} {word}" for value, word in zip(numbers[1:], words, strict=True) if value is not None]
    return f"{id}, round {number}{': far' if numbers[0] else ''}; {', '.join(parts)}"
