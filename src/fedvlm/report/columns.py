"""Columns on demand: what a record knows beyond the table of its protocol, by name.

Shares are fractions, as in a record's tables; columns of `units.UNITS` are not shares.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedvlm.errors import DataError, unknown_name
from fedvlm.evaluate.metrics import METRICS, Table, area_under_curve, curve_points, mean_accuracy, mean_metric, metrics
from fedvlm.record import Record
from fedvlm.report.runs import has_unseen_scores
from fedvlm.storage.files import flatten, slug

if TYPE_CHECKING:
    from fedvlm.core import Tensors


CONDITION_NUMBER_KEY, FREEDOM_KEY = "condition number", "degrees of freedom"  # what methods call them
CURVES = ("ROC", "PR")


def _mean(values: Iterable[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else None


def _mean_diagnostics(result: Record, seed: int, key: str) -> dict[str, float | None]:
    """By training, the mean over clients of what a method tells of its maps."""
    return {
        name: _mean(diagnostics.get(key) for diagnostics in about.get("maps", {}).values())
        for name, about in result.trainings(seed).items()
    }


def _condition_number(result: Record, seed: int) -> Table:
    return {"kappa": _mean(_mean_diagnostics(result, seed, CONDITION_NUMBER_KEY).values())}


def _condition_number_per_target(result: Record, seed: int) -> Table:
    return {f"kappa, target {name}": k for name, k in _mean_diagnostics(result, seed, CONDITION_NUMBER_KEY).items()}


def _degrees_of_freedom(result: Record, seed: int) -> Table:
    return {"dof": _mean(_mean_diagnostics(result, seed, FREEDOM_KEY).values())}


def _lines(result: Record, seed: int) -> list[dict[str, Any]]:
    trainings_of_seed = {f"{seed}-{slug(name)}" for name in result.trainings(seed)}
    return [line for line in result.lines() if line["training"] in trainings_of_seed]


def _cosine(result: Record, seed: int) -> Table:
    """Over all rounds: papers do not say over which."""
    return {"cosine": _mean(line.get("cosine") for line in _lines(result, seed))}


def _seconds(result: Record, seed: int) -> Table:
    return {"seconds per round": _mean(line["seconds"] for line in _lines(result, seed))}


def _minutes(result: Record, seed: int) -> Table:
    seconds = _seconds(result, seed)["seconds per round"]
    return {"minutes per round": None if seconds is None else seconds / 60}


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
    for training in result.trainings(seed):
        if not result.path_of(training, seed, "safetensors").exists():
            continue  # of a page there are no tensors
        shared, local = result.outcome(training, seed)
        sizes = [_size(tensors, method.traits.training.memory) for tensors in (shared, *local.values())]
        if isinstance(method, Factored):
            sizes[0] = _uploaded(result, seed)
        counts += [sizes[0] + local_size for local_size in sizes[1:]]
    return {"trained": _mean(counts) if identity["channel"] == asdict(Channel()) else None}


def _size(tensors: "Tensors", without: Container[str]) -> int:
    return sum(value.numel() for key, value in tensors.items() if key not in without)


def _uploaded(result: Record, seed: int) -> int:
    """Numbers of a client's upload, where the channel leaves them as they are."""
    sent = [client["bytes_up"] for line in _lines(result, seed) for client in line["clients"].values()]
    return max(sent, default=0) // 4


def accuracy_matrix(result: Record, seed: int) -> dict[str, dict[str, float]]:
    """A[unseen][domain]: the accuracy on a domain's test rows when another was left out."""
    trainings = result.trainings(seed)
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
    return {
        f"P, target {target}": _mean(value for k, value in row.items() if k != target)
        for target, row in accuracies.items()
    }


def _comprehensive_per_target(result: Record, seed: int) -> Table:
    accuracies = accuracy_matrix(result, seed)
    return {f"C, target {target}": _mean(row.values()) if target in row else None for target, row in accuracies.items()}


def _client_accuracies(result: Record, seed: int) -> list[list[float]]:
    """By training, the accuracy of every client that trained."""
    accuracies_by_training = []
    for about in result.trainings(seed).values():
        accuracies = [mean_accuracy(about["scores"], [id]) for id in about["train"]]
        accuracies_by_training.append([accuracy for accuracy in accuracies if accuracy is not None])
    return [accuracies for accuracies in accuracies_by_training if accuracies]


def _worst(result: Record, seed: int) -> Table:
    return {"worst client": _mean(min(accuracies) for accuracies in _client_accuracies(result, seed))}


def _spread(result: Record, seed: int) -> Table:
    several = [accuracies for accuracies in _client_accuracies(result, seed) if len(accuracies) > 1]
    return {"spread over clients": _mean(stdev(accuracies) for accuracies in several)}


def _average(result: Record, seed: int) -> Table:
    """Every metric over the clients that trained and the unseen ones, each counting the same."""
    out: Table = {}
    for name in METRICS if has_unseen_scores(result) else ():
        metric_values = [
            mean_metric(training["scores"], (*training["train"], *training["unseen"]), name)
            for training in result.trainings(seed).values()
        ]
        out[f"average {name}"] = _mean(metric_values)
    return out


def _rows(result: Record, seed: int) -> Table:
    """Of every client, in all its parts; the manifest has those of the first seed."""
    clients = result.manifest.get("clients", {})
    return {f"rows {id}": sum(counts.values()) for id, counts in clients.items()}


def ranking_curve(result: Record, kind: str, training: str | None = None, seed: int | None = None) -> list[list[float]]:
    """The points of an "ROC" or "PR" curve of the test rows of a training's own clients."""
    if kind not in CURVES:
        raise unknown_name("curve", kind, CURVES)
    trainings = result.trainings(seed)
    name = training or next(iter(trainings))
    if name not in trainings:
        raise unknown_name("training of this run", name, trainings)
    about = trainings[name]
    counts = [about["scores"][id]["scores"] for id in about["train"] if _has_score_counts(about, id)]
    if not counts:
        raise DataError(f"{result.folder} has no counts of scores; run it again to have them")
    counts_by_kind = zip(*counts, strict=True)  # of own classes, and of others
    return curve_points(
        [[sum(bin_counts) for bin_counts in zip(*client_counts, strict=True)] for client_counts in counts_by_kind], kind
    )


def _has_score_counts(about: Mapping[str, Any], id: str) -> bool:
    return "scores" in about["scores"].get(id, {})


def _area(kind: str) -> "Column":
    def column(result: Record, seed: int) -> Table:
        curves = [
            ranking_curve(result, kind, name, seed)
            for name, about in result.trainings(seed).items()
            if any(_has_score_counts(about, id) for id in about["train"])
        ]
        return {f"{kind} area": _mean(area_under_curve(curve_points, kind) for curve_points in curves if curve_points)}

    return column


def _metric(name: str) -> "Column":
    """The mean over trainings of a metric's mean over clients: those that trained, and unseen."""

    def column(result: Record, seed: int) -> Table:
        out: Table = {}
        trainings = result.trainings(seed).values()
        for group, key in list(CLIENT_GROUPS.items())[: 1 + has_unseen_scores(result)]:
            mean = _mean(mean_metric(training["scores"], training[key], name) for training in trainings)
            if mean is not None:
                out[f"{name}, {group}"] = mean
        return out

    return column


Column = Callable[[Record, int], Table]  # of a run and one of its seeds
COLUMNS: dict[str, Column] = {
    **{name: _metric(name) for name in METRICS},
    "kappa": _condition_number,
    "kappa-per-target": _condition_number_per_target,
    "cosine": _cosine,
    "dof": _degrees_of_freedom,
    "seconds": _seconds,
    "minutes": _minutes,
    "trained": _trained,
    "A[j][i]": _accuracy_columns,
    "P-per-target": _personal_per_target,
    "C-per-target": _comprehensive_per_target,
    "worst": _worst,
    "spread": _spread,
    "average": _average,
    "rows": _rows,
    **{kind: _area(kind) for kind in CURVES},
}


def split_requested(results: Sequence[Record], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names that are asked for: columns, and settings by dotted names; others are refused."""
    setting_names = {key for result in results for key in flatten(result.manifest["identity"])}
    requested, columns = list(dict.fromkeys(names)), {*COLUMNS, *metrics()}
    for name in requested:
        if name not in columns and name not in setting_names:
            raise unknown_name("column", name, columns | setting_names)
    chosen = [name for name in requested if name in columns]
    return chosen, [name for name in requested if name not in columns]


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


# How columns begin that are no shares, and the digits they are written with.
DIGITS_BY_PREFIX = {"kappa": 2, "cosine": 3, "dof": 0, "seconds": 3, "minutes": 3, "trained": 0, "rows": 0}
CLIENT_GROUPS = {"own": "train", "unseen": "unseen"}  # whom a metric's columns are of


def is_unscaled(column: str) -> bool:
    """Whether a column is not a share; a metric is one, whatever its name begins with."""
    metric = column.endswith(tuple(f", {group}" for group in CLIENT_GROUPS))
    return column.startswith(tuple(DIGITS_BY_PREFIX)) and not metric


def to_printed_unit(column: str, mean: float, deviation: float | None) -> tuple[float, float | None]:
    """In the unit of a print, where 100 · 0.9468 is 94.68 and not a little below it."""
    unit = 1 if is_unscaled(column) else 100
    return round(unit * mean, 9), None if deviation is None else round(unit * deviation, 9)


def format_number(column: str, value: float) -> str:
    """A number as tables have it: shares in per cent."""
    if not is_unscaled(column):
        return f"{100 * value:.2f}"
    digits = next(DIGITS_BY_PREFIX[key] for key in DIGITS_BY_PREFIX if column.startswith(key))
    return f"{value:.{digits}f}"
