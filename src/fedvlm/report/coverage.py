"""Which tables and figures of the papers run as published, from the files and nothing else."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal, get_args

from fedvlm.data.clients import By
from fedvlm.report.columns import COLUMNS
from fedvlm.report.papers import Item, Values, apart, find, items, numbers
from fedvlm.report.plots import KINDS as PLOTS
from fedvlm.storage.toml import flat

State = Literal["full", "partly", "not"]
STATES: tuple[State, ...] = ("full", "partly", "not")
# Which of the pictures that items ask for there are; what is built is added here.
OFFERED = ("plot:plans", "plot:kite", "column:gain")
# Pictures of `fedvlm plot` that items know by another name.
ALSO = {
    "plot:counts": "sweep",
    "plot:partition-by-domain": "partition",
    "plot:tsne-by-superclass": "tsne",
    "plot:heat-of-one-prompt": "heat",
}


@dataclass(frozen=True)
class Covered:
    """An item, whether its experiments run all of it, and what they lack."""

    item: Item
    state: State
    experiments: tuple[str, ...]
    lacks: tuple[str, ...]


def offered() -> set[str]:
    """What items may need besides runs: columns, pictures, ways of making clients."""
    columns = {f"column:{name}" for name in COLUMNS}
    plots = {*(f"plot:{kind}" for kind in PLOTS), *(key for key in ALSO if ALSO[key] in PLOTS)}
    return {*OFFERED, *columns, *plots, *(f"clients:{way}" for way in get_args(By))}


def wanted(item: Item) -> list[Values]:
    """The runs an item consists of, as the settings in which they must agree with it."""
    rows: list[dict[str, Any]] = []
    for grid in item.wants:
        swept = flat(grid.get("sweep", {}))
        for data, method in product(grid["data"], grid.get("methods", [""])):
            for values in product(*swept.values()):
                one = {"data": data, **dict(zip(swept, values, strict=True))}
                rows.append(one | ({"method.name": method} if method else {}))
    if not item.wants:
        for number in numbers()[item.name]:
            if number.method:
                one = {"data": number.data, "method.name": number.method, **number.settings}
                rows.append(one)
    unique = {repr(sorted(row.items(), key=str)): row for row in rows}
    return [{**item.settings, **row} for row in unique.values()]


def covered(item: Item, runs: Mapping[str, Iterable[Mapping[str, Any]]]) -> Covered:
    """What of an item the runs of the experiments that name it are; runs are identities."""
    every = [flat(one) for many in runs.values() for one in many]
    backbone = {key: value for key, value in item.settings.items() if key == "encoder"}
    lacks, other = [], False
    for row in wanted(item):
        open_ = {key: value for key, value in row.items() if key not in item.settings}
        bare = {key: value for key, value in row.items() if key not in backbone}
        found = [one for one in every if not apart(bare, one)]
        if not found:
            lacks.append(" ".join(f"{key}={value}" for key, value in open_.items()))
        other |= bool(found) and all(apart(backbone, one) for one in found)
    lacks += [f"{key}={value}" for key, value in backbone.items() if other]
    printed = numbers()[item.name]
    if not item.wants:
        lacks += sorted({f"row={one.row}" for one in printed if not one.method})
    if printed and all(one.status == "void" for one in printed):
        lacks.append("print:void")
    lacks += [need for need in item.needs if need not in offered()]
    state: State = "partly" if lacks else "full"
    return Covered(item, state if runs else "not", tuple(runs), tuple(lacks))


@cache
def reproducing() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The runs, as their identities, of the experiments that say they reproduce an item."""
    from fedvlm.runner.experiments import runs
    from fedvlm.runner.named import experiments
    from fedvlm.runner.settings import build, read_toml

    named: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in items()}
    for name, path in experiments().items():
        values = read_toml(path)
        if reproduced := values.get("reproduces", ()):
            identities = [build(one).identity() for one in runs(values)]
            for one in reproduced:
                named[find(one).name][name] = identities
    return named


@cache
def every_item() -> tuple[Covered, ...]:
    """All tables and figures, and what the experiments that name them run of them."""
    named = reproducing()
    return tuple(covered(item, named[name]) for name, item in items().items())


def coverage() -> list[dict[str, Any]]:
    """A row per document and one for all; full means that it runs as published.

    "on real data" counts items that were run on the data of the paper.
    """
    found = every_item()
    documents = list(dict.fromkeys(one.item.document for one in found))
    out = []
    for document in (*documents, "all"):
        mine = [one for one in found if document in ("all", one.item.document)]
        states = {f"{state}": sum(one.state == state for one in mine) for state in STATES}
        ran = sum(bool(one.item.run) for one in mine)
        printed = sum(one.item.numbers for one in mine)
        row = {"document": document, "items": len(mine), **states, "on real data": ran}
        out.append({**row, "numbers": printed, "detail": [_detail(one) for one in mine]})
    return out


def _detail(one: Covered) -> dict[str, Any]:
    return {
        "item": one.item.name,
        "what": one.item.what,
        "state": one.state,
        "experiments": list(one.experiments),
        "lacks": list(one.lacks),
    }
