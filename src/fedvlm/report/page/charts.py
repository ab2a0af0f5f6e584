"""Who has what and how each client fares: the model as drawings and tables of words."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from markupsafe import Markup

from fedvlm.evaluate.metrics import METRICS
from fedvlm.report.page.svg import bubbles, slopes

Model = Mapping[str, Any]
Run = Mapping[str, Any]
MOST = 40  # clients or classes that a drawing has room for


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


KINDS = {"zero-shot": 0, "alone": 2, "fedot-all-local": 2, "pooled": 3}  # all others are federated


def journeys(model: Model) -> dict[str, Any] | None:
    """Client by client: zero-shot, the federated run of the best mean, alone; the worst first."""
    kinds = [KINDS.get(run["identity"]["method"]["name"], 1) for run in model["runs"]]
    steps: list[tuple[str, dict[str, float]]] = []
    for kind, name in enumerate(("zero-shot", "federated", "alone")):
        there = [run for run, one in zip(model["runs"], kinds, strict=True) if one == kind]
        found = [(fmean(mine.values()), run["name"], mine) for run in there if (mine := own(run))]
        if found:
            _, run, mine = max(found, key=lambda one: one[0])
            steps.append((run if kind == 1 else name, mine))
    if len(steps) < 2:
        return None
    federated = next((mine for place, (_, mine) in enumerate(steps) if place), {})
    ids = sorted(federated, key=lambda id: federated[id])
    rows = []
    for id in ids[:MOST]:
        each = [mine.get(id) for _, mine in steps]
        told = [value for value in each if value is not None]
        rows.append((id, each, told[1] - told[0] if len(told) > 1 else None))
    return {"names": [name for name, _ in steps], "rows": rows, "left": len(ids[MOST:])}


def client_slopes(model: Model) -> Markup:
    """Zero-shot first, then what was federated, then what clients reach alone."""
    runs = sorted(model["runs"], key=lambda run: KINDS.get(run["identity"]["method"]["name"], 1))
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
