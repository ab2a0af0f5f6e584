"""Compute the columns of tables that are asked for by name, and format numbers in their units.

Accuracies and metrics are fractions, as in a record's tables, and are shown in per cent; columns of
`DIGITS_BY_PREFIX` are shown as they are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvlm.errors import DataError, unknown_name
from fedvlm.evaluate import findings
from fedvlm.evaluate.metrics import (
    METRICS,
    Table,
    area_under_curve,
    curve_points,
    mean_accuracy,
    mean_and_std,
    mean_metric,
    metrics,
)
from fedvlm.record import Record
from fedvlm.report.runs import differing_settings, find_training, has_unseen_scores, read_trainings
from fedvlm.storage.files import flatten, slug

if TYPE_CHECKING:
    pass


CONDITION_NUMBER_KEY, FREEDOM_KEY = "condition number", "degrees of freedom"  # what methods call them
CURVES = ("ROC", "PR")
CLIENT_GROUPS = {"own": "train", "unseen": "unseen"}  # the clients that a metric's columns are of
# How columns begin that are not shown in per cent, and their decimals.
DIGITS_BY_PREFIX = {"condition_number": 2, "cosine": 3, "dof": 0, "seconds": 3, "minutes": 3, "trained": 0, "rows": 0}
KAPPA_DIGITS = 3
CONTEXT_SETTINGS = ("data", "encoder", "protocol")  # that a table states where runs differ in them


def _mean(values: Iterable[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else None


def _mean_diagnostics(result: Record, seed: int, key: str) -> dict[str, float | None]:
    """By training, the mean over clients of what a method tells of its maps."""
    maps = {name: about.get("maps", {}).values() for name, about in read_trainings(result, seed).items()}
    return {name: _mean(diagnostics.get(key) for diagnostics in of_clients) for name, of_clients in maps.items()}


def _mean_of(title: str, values: "Callable[[Record, int], Iterable[float | None]]") -> "Column":
    """Make a column of the mean over some numbers of a seed."""
    return lambda result, seed: {title: _mean(values(result, seed))}


def _condition_number_per_target(result: Record, seed: int) -> Table:
    diagnostics = _mean_diagnostics(result, seed, CONDITION_NUMBER_KEY)
    return {f"condition_number, target {name}": k for name, k in diagnostics.items()}


def _kappa(result: Record, seed: int) -> Table:
    """Cohen's kappa, the mean over clients: agreement beyond chance, weighted if classes are ordered."""
    out: Table = {}
    for group, key in list(CLIENT_GROUPS.items())[: 1 + has_unseen_scores(result)]:
        scored = [t["scores"][id] for t in read_trainings(result, seed).values() for id in t[key] if id in t["scores"]]
        values = [cohens_kappa(s["confusion"], is_ordered(result)) for s in scored if "confusion" in s]
        out[f"kappa, {group}"] = _mean(values)
    return out


def cohens_kappa(confusion: Sequence[Sequence[int]], ordered: bool = False) -> float | None:
    """Compute kappa of [true, predicted, samples] counts; None where chance agreement is certain.

    With ordered classes a disagreement counts by the square of the distance between the two classes.
    """
    true, predicted, counts = np.array(confusion).T
    size = max(true.max(), predicted.max()) + 1
    observed = np.zeros((size, size))
    np.add.at(observed, (true, predicted), counts / counts.sum())
    distance = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    penalty = distance**2 if ordered else distance > 0
    expected = (penalty * np.outer(observed.sum(1), observed.sum(0))).sum()
    return float(1 - (penalty * observed).sum() / expected) if expected > 0 else None


def _lines(result: Record, seed: int) -> list[dict[str, Any]]:
    trainings_of_seed = {f"{seed}-{slug(name)}" for name in read_trainings(result, seed)}
    return [line for line in result.lines() if line["training"] in trainings_of_seed]


def _trained(result: Record, seed: int) -> Table:
    """Numbers that a client trains by gradients, shared and local; the mean over clients.

    Of a method that uploads factors of what is shared it is those.
    """
    from fedvlm.channel.settings import Channel
    from fedvlm.core import Factored, Trained, make

    identity = result.manifest["identity"]
    settings = dict(identity["method"])
    method = make(settings.pop("name"), **settings)
    if not isinstance(method, Trained):
        return {"trained": 0}
    counts: list[float | None] = []
    for training in read_trainings(result, seed):
        if not result.path_of(training, seed, "safetensors").exists():
            continue  # of a page there are no tensors
        shared, local = result.outcome(training, seed)
        memory = method.traits.training.memory
        sizes = [sum(v.numel() for k, v in part.items() if k not in memory) for part in (shared, *local.values())]
        if isinstance(method, Factored):
            sizes[0] = _uploaded(result, seed)
        counts += [sizes[0] + local_size for local_size in sizes[1:]]
    return {"trained": _mean(counts) if identity["channel"] == asdict(Channel()) else None}


def _uploaded(result: Record, seed: int) -> int:
    """Numbers of a client's upload, where the channel leaves them as they are."""
    sent = [client["bytes_up"] for line in _lines(result, seed) for client in line["clients"].values()]
    return max(sent, default=0) // 4


def accuracy_matrix(result: Record, seed: int) -> dict[str, dict[str, float]]:
    """A[unseen][domain]: the accuracy on a domain's test rows when another was left out."""
    trainings = read_trainings(result, seed)
    if result.manifest["identity"]["protocol"] != "leave-one-domain-out":
        return {}
    out: dict[str, dict[str, float]] = {}
    for target, about in trainings.items():
        accuracies = {k: mean_accuracy(about["scores"], training["unseen"]) for k, training in trainings.items()}
        defined = {k: value for k, value in accuracies.items() if value is not None}
        out[target] = {k: v for k, v in defined.items() if k != target or has_unseen_scores(result)}
    return out


def _accuracy_columns(result: Record, seed: int) -> Table:
    accuracies = accuracy_matrix(result, seed)
    return {f"A[{target}][{k}]": value for target, row in accuracies.items() for k, value in row.items()}


def _personal_per_target(result: Record, seed: int) -> Table:
    accuracies = accuracy_matrix(result, seed)
    rows = {target: [value for k, value in row.items() if k != target] for target, row in accuracies.items()}
    return {f"P, target {target}": _mean(values) for target, values in rows.items()}


def _comprehensive_per_target(result: Record, seed: int) -> Table:
    accuracies = accuracy_matrix(result, seed)
    return {f"C, target {target}": _mean(row.values()) if target in row else None for target, row in accuracies.items()}


def _client_accuracies(result: Record, seed: int) -> list[list[float]]:
    """By training, the accuracy of every client that trained."""
    accuracies_by_training = []
    for about in read_trainings(result, seed).values():
        accuracies = [mean_accuracy(about["scores"], [id]) for id in about["train"]]
        accuracies_by_training.append([accuracy for accuracy in accuracies if accuracy is not None])
    return [accuracies for accuracies in accuracies_by_training if accuracies]


def _average(result: Record, seed: int) -> Table:
    """Every metric over the clients that trained and the unseen ones, each counting the same."""
    out: Table = {}
    for name in METRICS if has_unseen_scores(result) else ():
        trainings = read_trainings(result, seed).values()
        metric_values = [mean_metric(t["scores"], (*t["train"], *t["unseen"]), name) for t in trainings]
        out[f"average {name}"] = _mean(metric_values)
    return out


def _rows(result: Record, seed: int) -> Table:
    """Of every client, in all its parts; the manifest has those of the first seed."""
    clients = result.manifest.get("clients", {})
    return {f"rows {id}": sum(counts.values()) for id, counts in clients.items()}


def ranking_curve(result: Record, kind: str, training: str | None = None, seed: int | None = None) -> list[list[float]]:
    """Return the points of the "ROC" or "PR" curve of the test samples of a training's own clients."""
    if kind not in CURVES:
        raise unknown_name("curve", kind, CURVES)
    about = find_training(result, training, seed)
    counts = [about["scores"][id]["scores"] for id in about["train"] if _has_score_counts(about, id)]
    if not counts:
        raise DataError(f"{result.folder} has no counts of scores; run it again to have them")
    return curve_points(np.array(counts).sum(0).tolist(), kind)


def _has_score_counts(about: Mapping[str, Any], id: str) -> bool:
    return "scores" in about["scores"].get(id, {})


def _area(kind: str) -> "Column":
    def column(result: Record, seed: int) -> Table:
        trainings = read_trainings(result, seed).items()
        names = [name for name, about in trainings if any(_has_score_counts(about, id) for id in about["train"])]
        curves = [ranking_curve(result, kind, name, seed) for name in names]
        return {f"{kind} area": _mean(area_under_curve(points, kind) for points in curves if points)}

    return column


def _metric(name: str) -> "Column":
    """The mean over trainings of a metric's mean over clients: those that trained, and unseen."""

    def column(result: Record, seed: int) -> Table:
        out: Table = {}
        trainings = read_trainings(result, seed).values()
        for group, key in list(CLIENT_GROUPS.items())[: 1 + has_unseen_scores(result)]:
            mean = _mean(mean_metric(training["scores"], training[key], name) for training in trainings)
            if mean is not None:
                out[f"{name}, {group}"] = mean
        return out

    return column


def _findings(result: Record, seed: int) -> Table:
    """AUC and average precision of each finding, over the clients that trained."""
    out: Table = {}
    trainings = read_trainings(result, seed).values()
    for number, finding in enumerate(result.manifest["classes"] if result.manifest.get("multi_label") else ()):
        for name in ("AUC", "AP"):
            scored = [training["scores"].get(id, {}) for training in trainings for id in training["train"]]
            by_client = [scores["findings"][number].get(name) for scores in scored if "findings" in scores]
            out[f"{name} {finding}"] = _mean(by_client)
    return out


Column = Callable[[Record, int], Table]  # of a run and one of its seeds
COLUMNS: dict[str, Column] = {
    **{name: _metric(name) for name in dict.fromkeys((*METRICS, *findings.METRICS))},
    "findings": _findings,
    "condition_number": _mean_of(
        "condition_number", lambda run, seed: _mean_diagnostics(run, seed, CONDITION_NUMBER_KEY).values()
    ),
    "condition_number-per-target": _condition_number_per_target,
    "kappa": _kappa,
    # over all rounds: papers do not say over which
    "cosine": _mean_of("cosine", lambda run, seed: (line.get("cosine") for line in _lines(run, seed))),
    "dof": _mean_of("dof", lambda run, seed: _mean_diagnostics(run, seed, FREEDOM_KEY).values()),
    "seconds": _mean_of("seconds per round", lambda run, seed: (line["seconds"] for line in _lines(run, seed))),
    "minutes": _mean_of("minutes per round", lambda run, seed: (line["seconds"] / 60 for line in _lines(run, seed))),
    "trained": _trained,
    "A[j][i]": _accuracy_columns,
    "P-per-target": _personal_per_target,
    "C-per-target": _comprehensive_per_target,
    "worst": _mean_of("worst client", lambda run, seed: map(min, _client_accuracies(run, seed))),
    "spread": _mean_of(
        "spread over clients", lambda run, seed: (stdev(each) for each in _client_accuracies(run, seed) if each[1:])
    ),
    "average": _average,
    "rows": _rows,
    **{kind: _area(kind) for kind in CURVES},
}


MULTI_LABEL_COLUMNS = ("AUC", "AP")  # beside the accuracy, which says little of rare findings
UNEVEN_COLUMNS = ("balanced", "F1")  # beside the accuracy, which says little of rare classes
MAX_EVEN_RATIO = 3  # of the largest class to the smallest


def usual_columns(result: Record) -> tuple[str, ...]:
    """Return the metrics that stand beside the accuracy of a run by default."""
    if result.manifest.get("multi_label"):
        return MULTI_LABEL_COLUMNS
    counts = [count for count in map(sum, zip(*result.manifest.get("counts", {}).values(), strict=True)) if count]
    is_uneven = bool(counts) and max(counts) > MAX_EVEN_RATIO * min(counts)
    return UNEVEN_COLUMNS * is_uneven + ("kappa",) * is_ordered(result)


def is_ordered(result: Record) -> bool:
    return bool(result.manifest["identity"].get("ordered"))


def split_requested(results: Sequence[Record], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names that are asked for: columns, and settings by dotted names; others are refused."""
    setting_names = {key for result in results for key in flatten(result.manifest["identity"])}
    usual = [name for result in results for name in usual_columns(result)]
    requested, columns = list(dict.fromkeys([*usual, *names])), {*COLUMNS, *metrics()}
    for name in requested:
        if name not in columns and name not in setting_names:
            raise unknown_name("column", name, columns | setting_names)
    flat = [flatten(result.manifest["identity"]) for result in results]
    context = [key for key in CONTEXT_SETTINGS if key in differing_settings(flat) and key not in requested]
    chosen = [name for name in requested if name in columns]
    return chosen, [*context, *(name for name in requested if name not in columns)]


def compute_columns(result: Record, names: Iterable[str]) -> list[Table]:
    """A table per seed, of the columns with these names."""
    names = list(names)
    out: list[Table] = []
    for seed in result.manifest["identity"]["seeds"]:
        row: Table = {}
        for name in names:
            column = COLUMNS.get(name) or _metric(name)  # of an outside package
            row |= column(result, seed)
        out.append(row)
    return out


def settings_of(result: Record, names: Iterable[str]) -> dict[str, Any]:
    """What settings of a run are, by dotted names; None for one it does not have."""
    settings = flatten(result.manifest["identity"])
    return {name: settings.get(name) for name in names}


def setting_text(result: Record, name: str) -> str:
    """One of them, as a cell of a table."""
    value = settings_of(result, [name])[name]
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)


def column_value(result: Record, column: str) -> tuple[float | None, float | None]:
    """Return mean and standard deviation over seeds of a column of its table, or of one on demand."""
    statistics = mean_and_std(result.tables)
    if column in statistics:
        return statistics[column]
    if column not in COLUMNS:
        raise unknown_name("column", column, {*statistics, *COLUMNS})
    return next(iter(mean_and_std(compute_columns(result, [column])).values()), (None, None))


def is_unscaled(column: str) -> bool:
    """Whether a column is not shown in per cent; metrics are, but for Cohen's kappa."""
    is_metric = column.endswith(tuple(f", {group}" for group in CLIENT_GROUPS))
    return column.startswith("kappa, ") if is_metric else column.startswith(tuple(DIGITS_BY_PREFIX))


def to_printed_unit(column: str, mean: float, std: float | None) -> tuple[float, float | None]:
    """Convert to the unit of tables, where 100 · 0.9468 is 94.68 and not a little below it."""
    unit = 1 if is_unscaled(column) else 100
    return round(unit * mean, 9), None if std is None else round(unit * std, 9)


def format_number(column: str, value: float) -> str:
    """Format a number as tables show it, fractions in per cent."""
    if not is_unscaled(column):
        return f"{100 * value:.2f}"
    digits = next((DIGITS_BY_PREFIX[key] for key in DIGITS_BY_PREFIX if column.startswith(key)), KAPPA_DIGITS)
    return f"{value:.{digits}f}"
