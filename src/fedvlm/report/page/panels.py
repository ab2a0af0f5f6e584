"""Curves of the model: over the rounds, how sure and how useful, what a method says of itself."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup

from fedvlm.report.page.svg import Line, Panel, scatter_chart

Model = Mapping[str, Any]
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


def rounds(model: Model) -> list[Markup]:
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


def sure(model: Model) -> dict[str, list[Markup]]:
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


def inside(model: Model) -> list[Markup]:
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
