"""Who has what and how each client fares: the model as drawings and tables of words."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from markupsafe import Markup

from fedvlm.evaluate.metrics import METRICS
from fedvlm.report.page.svg import bubble_chart, slopegraph

Model = Mapping[str, Any]
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
