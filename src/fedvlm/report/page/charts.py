"""The model as drawings and as tables of words, section by section."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup

from fedvlm.evaluate.metrics import METRICS
from fedvlm.report.page.svg import Line, Panel, bubbles, slopes

Model = Mapping[str, Any]
Run = Mapping[str, Any]
MOST = 40  # clients or classes that a drawing has room for
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
    for key, name, share in PANELS:
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
                unit = "%" if share else key
                log = across == "kB"
                out.append(Panel(name + by, x, unit, lines, log, share, key=key, across=across))
    ordered = sorted(out, key=lambda panel: panel.across == "kB")
    return [_figure(panel) for panel in ordered]


def average(
    place: int, curves: Sequence[Mapping[str, Any]], key: str, across: str = "round"
) -> Line:
    """Mean over trainings and seeds, and a band of a deviation over seeds."""
    by_seed: dict[int, list[Mapping[str, Any]]] = {}
    for one in curves:
        if key in one:
            by_seed.setdefault(one["seed"], []).append(one)
    length = min((len(one["kB"]) for each in by_seed.values() for one in each), default=0)
    points, band = [], []
    for number in range(length):
        means = []
        for each in by_seed.values():
            values = [one[key][number] for one in each if one[key][number] is not None]
            if values:
                means.append(fmean(values))
        moved = fmean(one["kB"][number] for each in by_seed.values() for one in each)
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
    caption = Markup("<figcaption>{}</figcaption>").format(panel.name)
    return Markup("<figure>") + caption + panel.draw() + Markup("</figure>")


def sure(model: Model) -> dict[str, list[Markup]]:
    """Reliability, ROC, precision-recall and decision curve, by who was tested."""
    whole = (0.0, 1.0)
    out = {}
    for kind in ("clients", "unseen"):
        found = {i: run["sure"][kind] for i, run in enumerate(model["runs"]) if kind in run["sure"]}
        if not found:
            continue
        full = {  # bins of a hundredth of the rows or more
            i: [
                (point, n / max(one["bins"]))
                for point, n in zip(one["reliability"], one["bins"], strict=True)
                if 100 * n >= one["rows"]
            ]
            for i, one in found.items()
        }
        panels = [
            Panel(
                "reliability: how often it is right when it is sure",
                "confidence",
                "% right",
                [
                    Line(i, [p for p, _ in each], dots=[n for _, n in each])
                    for i, each in full.items()
                ],
                diagonal=True,
                x_range=whole,
                y_range=whole,
            )
        ]
        ranked = {i: one for i, one in found.items() if "ROC" in one}
        if ranked:
            roc = [Line(i, one["ROC"]) for i, one in ranked.items()]
            panels.append(
                Panel(
                    "ROC, every row with every class",
                    "share of false alarms",
                    "% found",
                    roc,
                    diagonal=True,
                    x_range=whole,
                    y_range=whole,
                )
            )
            precision = [Line(i, one["precision"]) for i, one in ranked.items()]
            panels.append(
                Panel(
                    "precision and recall",
                    "recall",
                    "% precision",
                    precision,
                    x_range=whole,
                    y_range=whole,
                )
            )
        decisions = [Line(i, one["decision"]) for i, one in found.items()]
        panels.append(Panel("decision curve", "threshold", "net benefit", decisions, percent=False))
        out[kind] = [_figure(panel) for panel in panels]
    return out


def inside(model: Model) -> list[Markup]:
    """Angles by which maps turn, and weights of sentences."""
    runs = list(enumerate(model["runs"]))
    turned = [
        Line(i, [(k / (len(run["angles"]) - 1), angle) for k, angle in enumerate(run["angles"])])
        for i, run in runs
        if run["angles"]
    ]
    weights = [
        Line(i, [(float(k), one) for k, one in enumerate(run["weights"][:MOST], 1)])
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
    return [_figure(panel) for panel in out]


def partitions(model: Model) -> list[dict[str, Any]]:
    """Who has which rows, once for runs that share them."""
    out: dict[str, dict[str, Any]] = {}
    for run in model["runs"]:
        if run["rows"] in out:
            continue
        counts = run["counts"] or {}
        ids = sorted(run["clients"], key=lambda id: -run["clients"][id]["train"])
        shown = [id for id in ids if id in counts][:MOST]
        classes = run["classes"][: 2 * MOST]
        grid = [counts[id][: 2 * MOST] for id in shown]
        out[run["rows"]] = {
            "data": run["data"],
            "drawing": bubbles(grid, shown, classes) if shown else "",
            "left": [len(ids) - len(shown), len(run["classes"]) - len(classes)],
            "clients": [
                {"client": id, **run["clients"][id], "classes": sum(map(bool, counts.get(id, [])))}
                for id in ids[: 2 * MOST]
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
        who = next(iter(run["who"].values()))  # of cross-device those of the first seed
        unseen = {(training, id) for training, (_, away) in who.items() for id in away}
        every = {id: [fmean(v) for (_, one), v in means.items() if one == id] for id in ids}
        shown = sorted(ids, key=lambda id: fmean(every[id]))[:MOST]
        rows = [
            (
                training,
                [
                    (
                        fmean(means[training, id]) if (training, id) in means else None,
                        (training, id) in unseen,
                    )
                    for id in ids
                    if id in shown
                ],
            )
            for training in who
        ]
        out.append(
            {
                "run": place,
                "name": run["name"],
                "clients": [id for id in ids if id in shown],
                "left": len(ids) - len(shown),
                "rows": rows,
                **_spread(run),
            }
        )
    return out


def own(run: Run, key: str = "accuracy") -> dict[str, float]:
    """A number of each client that trained, the mean over trainings and seeds."""
    found: dict[str, list[float]] = {}
    for cell in run["cells"]:
        if not cell["unseen"] and key in cell:
            found.setdefault(cell["client"], []).append(cell[key])
    return {id: fmean(each) for id, each in found.items()}


def _spread(run: Run) -> dict[str, Any]:
    mine = own(run)
    if not mine:
        return {"worst": None, "spread": None, "metrics": {}}
    worst = min(mine, key=lambda id: mine[id])
    metrics = {key: fmean(each.values()) for key in METRICS if (each := own(run, key))}
    return {
        "worst": (worst, mine[worst]),
        "spread": max(mine.values()) - min(mine.values()),
        "metrics": metrics,
    }


def client_slopes(model: Model) -> Markup:
    """Zero-shot first, then what was federated, then what clients reach alone."""
    rank = {"zero-shot": 0, "alone": 2, "fedot-all-local": 2, "pooled": 3}
    runs = sorted(model["runs"], key=lambda run: rank.get(run["identity"]["method"]["name"], 1))
    found = [own(run) for run in runs]
    ids = list(dict.fromkeys(id for one in found for id in one))
    if len(runs) < 2 or not ids:
        return Markup("")
    worst = sorted(ids, key=lambda id: min(one.get(id, 1.0) for one in found))[: MOST // 2]
    lines = [(id, [one.get(id) for one in found]) for id in ids if id in worst]
    return slopes([run["name"] for run in runs], lines)


def confusion(model: Model) -> dict[str, Any] | None:
    """Of the run that leads, or the first: true classes down, answers across, in per cent."""
    first = next(iter(model["verdicts"].values()), {"best": 0})
    run = model["runs"][first["best"]]
    kind = "unseen" if "unseen" in run["sure"] and run["tables"][0].get("G", 0) else "clients"
    cells = run["sure"].get(kind, {}).get("confusion")
    if not cells or len(run["classes"]) > MOST:
        return None
    grid = [[0] * len(run["classes"]) for _ in run["classes"]]
    for true, guess, rows in cells:
        grid[true][guess] = rows
    return {"run": run["name"], "kind": kind, "classes": run["classes"], "grid": grid}
