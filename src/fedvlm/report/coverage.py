"""Which tables and figures of the papers run as published, from the files and nothing else."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal, get_args

from fedvlm.data.clients import By
from fedvlm.report.columns import COLUMNS
from fedvlm.report.papers import Item, Values, find_item, flat_differences, items, numbers
from fedvlm.report.plots import PLOT_KINDS as PLOTS
from fedvlm.storage.toml import flatten

State = Literal["full", "partly", "not"]
STATES: tuple[State, ...] = ("full", "partly", "not")
# Which of the pictures that items ask for there are; what is built is added here.
OTHER_FEATURES = ("plot:plans", "plot:kite", "column:gain")
# Pictures of `fedvlm plot` that items know by another name.
PLOT_ALIASES = {
    "plot:counts": "sweep",
    "plot:partition-by-domain": "partition",
    "plot:tsne-by-superclass": "tsne",
    "plot:heat-of-one-prompt": "heat",
}


@dataclass(frozen=True)
class CoveredItem:
    """An item, whether its experiments run all of it, and what they lack."""

    item: Item
    state: State
    experiments: tuple[str, ...]
    missing: tuple[str, ...]


def available_features() -> set[str]:
    """What items may need besides runs: columns, pictures, ways of making clients."""
    columns = {f"column:{name}" for name in COLUMNS}
    plots = {*(f"plot:{kind}" for kind in PLOTS), *(key for key in PLOT_ALIASES if PLOT_ALIASES[key] in PLOTS)}
    return {*OTHER_FEATURES, *columns, *plots, *(f"clients:{way}" for way in get_args(By))}


def expected_runs(item: Item) -> list[Values]:
    """The runs an item consists of, as the settings in which they must agree with it."""
    rows: list[dict[str, Any]] = []
    for grid in item.wants:
        swept = flatten(grid.get("sweep", {}))
        for data, method in product(grid["data"], grid.get("methods", [""])):
            for values in product(*swept.values()):
                run_settings = {"data": data, **dict(zip(swept, values, strict=True))}
                rows.append(run_settings | ({"method.name": method} if method else {}))
    if not item.wants:
        for number in numbers()[item.name]:
            if number.method:
                run_settings = {"data": number.data, "method.name": number.method, **number.settings}
                rows.append(run_settings)
    unique = {repr(sorted(row.items(), key=str)): row for row in rows}
    return [{**item.settings, **row} for row in unique.values()]


def item_coverage(item: Item, runs: Mapping[str, Iterable[Mapping[str, Any]]]) -> CoveredItem:
    """What of an item the runs of the experiments that name it are; runs are identities."""
    identities = [flatten(identity) for runs_of_experiment in runs.values() for identity in runs_of_experiment]
    backbone = {key: value for key, value in item.settings.items() if key == "encoder"}
    missing, has_other_backbone = [], False
    for row in expected_runs(item):
        open_ = {key: value for key, value in row.items() if key not in item.settings}
        bare = {key: value for key, value in row.items() if key not in backbone}
        matching = [identity for identity in identities if not flat_differences(bare, identity)]
        if not matching:
            missing.append(" ".join(f"{key}={value}" for key, value in open_.items()))
        has_other_backbone |= bool(matching) and all(flat_differences(backbone, identity) for identity in matching)
    missing += [f"{key}={value}" for key, value in backbone.items() if has_other_backbone]
    printed = numbers()[item.name]
    if not item.wants:
        missing += sorted({f"row={identity.row}" for identity in printed if not identity.method})
    if printed and all(identity.status == "void" for identity in printed):
        missing.append("print:void")
    missing += [requirement for requirement in item.needs if requirement not in available_features()]
    state: State = "partly" if missing else "full"
    return CoveredItem(item, state if runs else "not", tuple(runs), tuple(missing))


@cache
def runs_by_item() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The runs, as their identities, of the experiments that say they reproduce an item."""
    from fedvlm.runner.experiments import experiment_runs
    from fedvlm.runner.named import experiments
    from fedvlm.runner.settings import build, read_toml

    named: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in items()}
    for name, path in experiments().items():
        values = read_toml(path)
        if reproduced := values.get("reproduces", ()):
            identities = [build(item_name).identity() for item_name in experiment_runs(values)]
            for item_name in reproduced:
                named[find_item(item_name).name][name] = identities
    return named


@cache
def all_coverage() -> tuple[CoveredItem, ...]:
    """All tables and figures, and what the experiments that name them run of them."""
    named = runs_by_item()
    return tuple(item_coverage(item, named[name]) for name, item in items().items())


def coverage() -> list[dict[str, Any]]:
    """A row per document and one for all; full means that it runs as published.

    "on real data" counts items that were run on the data of the paper.
    """
    covered_items = all_coverage()
    documents = list(dict.fromkeys(covered_item.item.document for covered_item in covered_items))
    out = []
    for document in (*documents, "all"):
        items_of_document = [
            covered_item for covered_item in covered_items if document in ("all", covered_item.item.document)
        ]
        states = {
            f"{state}": sum(covered_item.state == state for covered_item in items_of_document) for state in STATES
        }
        ran = sum(bool(covered_item.item.run) for covered_item in items_of_document)
        printed = sum(covered_item.item.numbers for covered_item in items_of_document)
        row = {"document": document, "items": len(items_of_document), **states, "on real data": ran}
        out.append({**row, "numbers": printed, "detail": [_detail(covered_item) for covered_item in items_of_document]})
    return out


def _detail(covered_item: CoveredItem) -> dict[str, Any]:
    return {
        "item": covered_item.item.name,
        "what": covered_item.item.title,
        "state": covered_item.state,
        "experiments": list(covered_item.experiments),
        "lacks": list(covered_item.missing),
    }
