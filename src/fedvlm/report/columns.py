"""Columns on demand: what a record knows beyond the table of its protocol, by name.

Shares are fractions, as in a record's tables; columns of `units.UNITS` are not shares.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedvlm.errors import DataError, unknown
from fedvlm.evaluate import scores
from fedvlm.evaluate.metrics import METRICS, area, metrics, points
from fedvlm.evaluate.scores import Table
from fedvlm.record import Record
from fedvlm.report.names import generalises
from fedvlm.report.units import WHO
from fedvlm.storage.files import slug
from fedvlm.storage.toml import flat

if TYPE_CHECKING:
    from fedvlm.core import Tensors

KAPPA, FREEDOM = "condition number", "degrees of freedom"  # what methods call them
CURVES = ("ROC", "PR")


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if there else None


def _described(result: Record, seed: int, key: str) -> dict[str, float | None]:
    """By training, the mean over clients of what a method tells of its maps."""
    return {
        name: _mean(one.get(key) for one in about.get("maps", {}).values())
        for name, about in result.trainings(seed).items()
    }


def _kappa(result: Record, seed: int) -> Table:
    return {"kappa": _mean(_described(result, seed, KAPPA).values())}


def _kappas(result: Record, seed: int) -> Table:
    return {f"kappa, target {name}": k for name, k in _described(result, seed, KAPPA).items()}


def _freedom(result: Record, seed: int) -> Table:
    return {"dof": _mean(_described(result, seed, FREEDOM).values())}


def _lines(result: Record, seed: int) -> list[dict[str, Any]]:
    mine = {f"{seed}-{slug(name)}" for name in result.trainings(seed)}
    return [line for line in result.lines() if line["training"] in mine]


def _cosine(result: Record, seed: int) -> Table:
    """Over all rounds: papers do not say over which."""
    return {"cosine": _mean(line.get("cosine") for line in _lines(result, seed))}


def _seconds(result: Record, seed: int) -> Table:
    return {"seconds per round": _mean(line["seconds"] for line in _lines(result, seed))}


def _minutes(result: Record, seed: int) -> Table:
    each = _seconds(result, seed)["seconds per round"]
    return {"minutes per round": None if each is None else each / 60}


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
        both = [_size(one, method.traits.memory) for one in (shared, *local.values())]
        if isinstance(method, Factored):
            both[0] = _uploaded(result, seed)
        counts += [both[0] + own for own in both[1:]]
    return {"trained": _mean(counts) if identity["channel"] == asdict(Channel()) else None}


def _size(tensors: "Tensors", without: Container[str]) -> int:
    return sum(value.numel() for key, value in tensors.items() if key not in without)


def _uploaded(result: Record, seed: int) -> int:
    """Numbers of a client's upload, where the channel leaves them as they are."""
    sent = [one["bytes_up"] for line in _lines(result, seed) for one in line["clients"].values()]
    return max(sent, default=0) // 4


def cells(result: Record, seed: int) -> dict[str, dict[str, float]]:
    """A[unseen][domain]: the accuracy on a domain's test rows when another was left out."""
    found = result.trainings(seed)
    if result.manifest["identity"]["protocol"] != "leave-one-domain-out":
        return {}
    out: dict[str, dict[str, float]] = {}
    for held, about in found.items():
        each = {k: scores.accuracy(about["scores"], one["unseen"]) for k, one in found.items()}
        known = {k: value for k, value in each.items() if value is not None}
        out[held] = {k: v for k, v in known.items() if k != held or generalises(result)}
    return out


def _cells(result: Record, seed: int) -> Table:
    every = cells(result, seed)
    return {f"A[{held}][{k}]": value for held, row in every.items() for k, value in row.items()}


def _personal(result: Record, seed: int) -> Table:
    every = cells(result, seed)
    return {
        f"P, target {held}": _mean(value for k, value in row.items() if k != held)
        for held, row in every.items()
    }


def _comprehensive(result: Record, seed: int) -> Table:
    every = cells(result, seed)
    return {
        f"C, target {held}": _mean(row.values()) if held in row else None
        for held, row in every.items()
    }


def _own(result: Record, seed: int) -> list[list[float]]:
    """By training, the accuracy of every client that trained."""
    found = []
    for about in result.trainings(seed).values():
        each = [scores.accuracy(about["scores"], [id]) for id in about["train"]]
        found.append([one for one in each if one is not None])
    return [each for each in found if each]


def _worst(result: Record, seed: int) -> Table:
    return {"worst client": _mean(min(each) for each in _own(result, seed))}


def _spread(result: Record, seed: int) -> Table:
    several = [each for each in _own(result, seed) if len(each) > 1]
    return {"spread over clients": _mean(stdev(each) for each in several)}


def _average(result: Record, seed: int) -> Table:
    """Every metric over the clients that trained and the unseen ones, each counting the same."""
    out: Table = {}
    for name in METRICS if generalises(result) else ():
        each = [
            scores.metric(one["scores"], (*one["train"], *one["unseen"]), name)
            for one in result.trainings(seed).values()
        ]
        out[f"average {name}"] = _mean(each)
    return out


def _rows(result: Record, seed: int) -> Table:
    """Of every client, in all its parts; the manifest has those of the first seed."""
    clients = result.manifest.get("clients", {})
    return {f"rows {id}": sum(one.values()) for id, one in clients.items()}


def curve(
    result: Record, kind: str, training: str | None = None, seed: int | None = None
) -> list[list[float]]:
    """The points of an "ROC" or "PR" curve of the test rows of a training's own clients."""
    if kind not in CURVES:
        raise unknown("curve", kind, CURVES)
    trainings = result.trainings(seed)
    name = training or next(iter(trainings))
    if name not in trainings:
        raise unknown("training of this run", name, trainings)
    about = trainings[name]
    counts = [about["scores"][id]["scores"] for id in about["train"] if _counted(about, id)]
    if not counts:
        raise DataError(f"{result.folder} has no counts of scores; run it again to have them")
    both = zip(*counts, strict=True)  # of own classes, and of others
    return points([[sum(each) for each in zip(*one, strict=True)] for one in both], kind)


def _counted(about: Mapping[str, Any], id: str) -> bool:
    return "scores" in about["scores"].get(id, {})


def _area(kind: str) -> "Column":
    def column(result: Record, seed: int) -> Table:
        found = [
            curve(result, kind, name, seed)
            for name, about in result.trainings(seed).items()
            if any(_counted(about, id) for id in about["train"])
        ]
        return {f"{kind} area": _mean(area(one, kind) for one in found if one)}

    return column


def _metric(name: str) -> "Column":
    """The mean over trainings of a metric's mean over clients: those that trained, and unseen."""

    def column(result: Record, seed: int) -> Table:
        out: Table = {}
        trainings = result.trainings(seed).values()
        for who, key in list(WHO.items())[: 1 + generalises(result)]:
            mean = _mean(scores.metric(one["scores"], one[key], name) for one in trainings)
            if mean is not None:
                out[f"{name}, {who}"] = mean
        return out

    return column


Column = Callable[[Record, int], Table]  # of a run and one of its seeds
COLUMNS: dict[str, Column] = {
    **{name: _metric(name) for name in METRICS},
    "kappa": _kappa,
    "kappa-per-target": _kappas,
    "cosine": _cosine,
    "dof": _freedom,
    "seconds": _seconds,
    "minutes": _minutes,
    "trained": _trained,
    "A[j][i]": _cells,
    "P-per-target": _personal,
    "C-per-target": _comprehensive,
    "worst": _worst,
    "spread": _spread,
    "average": _average,
    "rows": _rows,
    **{kind: _area(kind) for kind in CURVES},
}


def split(results: Sequence[Record], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names that are asked for: columns, and settings by dotted names; others are refused."""
    known = {key for one in results for key in flat(one.manifest["identity"])}
    asked, columns = list(dict.fromkeys(names)), {*COLUMNS, *metrics()}
    for name in asked:
        if name not in columns and name not in known:
            raise unknown("column", name, columns | known)
    chosen = [name for name in asked if name in columns]
    return chosen, [name for name in asked if name not in columns]


def on_demand(result: Record, names: Iterable[str]) -> list[Table]:
    """A table per seed, of the columns with these names."""
    names = list(names)
    out: list[Table] = []
    for seed in result.manifest["identity"]["seeds"]:
        one: Table = {}
        for name in names:
            column = COLUMNS.get(name) or _metric(name)  # of an outside package
            one |= column(result, seed)
        out.append(one)
    return out


def settings_of(result: Record, names: Iterable[str]) -> dict[str, Any]:
    """What settings of a run are, by dotted names; None for one it does not have."""
    known = flat(result.manifest["identity"])
    return {name: known.get(name) for name in names}


def setting(result: Record, name: str) -> str:
    """One of them, as a cell of a table."""
    value = settings_of(result, [name])[name]
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)
