"""Read the numbers that papers print, judge measured ones against them, and list what can be reproduced."""

import csv
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import product
from math import hypot
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from fedvlm.data.clients import PartitionKind
from fedvlm.errors import DataError, SettingsError
from fedvlm.report.charts import PLOT_KINDS as PLOTS
from fedvlm.report.columns import COLUMNS, is_unscaled
from fedvlm.runner.experiment_files import experiment_folders, experiments, read_toml
from fedvlm.runner.experiments import experiment_runs
from fedvlm.runner.settings import Settings, build, override
from fedvlm.storage.files import flatten

LOWER_IS_BETTER = ("condition_number", "minutes", "ECE", "target ECE")  # how columns begin in which less is better
Values = Mapping[str, Any]  # settings by their dotted names, as `--set` has them
Readers = dict[str, Callable[[str], Any]]  # of the cells of a column
Row = TypeVar("Row")
VerdictWord = Literal["met", "within noise", "differs", "suspicious", "void", "not comparable"]


@dataclass(frozen=True)
class PrintedNumber:
    """One printed number; values are as printed, accuracies in per cent."""

    paper: str
    version: str
    item: str
    row: str  # the method as the table calls it
    data: str
    method: str  # as it is registered here; empty where there is none
    settings: Values  # in which the run must agree
    column: str  # as our tables call it
    value: float
    deviation: float | None
    round: str  # how it was chosen; empty where there is none
    status: str
    reason: str  # a number is void, or where it was copied from
    line: int  # of the document

    @property
    def of_data(self) -> bool:
        return not self.method and self.column.startswith("rows ")  # any run has it

    @property
    def name(self) -> str:
        return f"{document_name(self.paper, self.version)}/{self.item}"


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper, and what running it as published takes."""

    paper: str
    version: str
    item: str
    title: str
    kind: str
    numbers: int  # that are printed, in it or of it in the text
    settings: Values  # of all its runs
    wants: tuple[Mapping[str, Any], ...]  # its runs, if they do not follow from its numbers
    needs: tuple[str, ...]  # columns and pictures, as `column:condition_number`
    run: str  # where it was run on its own data, if it ever was

    @property
    def name(self) -> str:
        return f"{document_name(self.paper, self.version)}/{self.item}"

    @property
    def document(self) -> str:
        return document_name(self.paper, self.version)


@dataclass(frozen=True)
class Verdict:
    word: VerdictWord
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.word} ({self.reason})" if self.reason else self.word


def document_name(paper: str, version: str) -> str:
    return f"{paper}-{version}" if version else paper


def papers_folder() -> Path:
    """Return the folder with the papers' numbers, which lies in the folder of the experiments."""
    for folder in experiment_folders():
        if (folder / "papers" / "items.csv").is_file():
            return folder / "papers"
    raise DataError("the papers' numbers are not there; install fedvlm again")


@cache
def items() -> dict[str, Item]:
    """Return all tables and figures by name, e.g. fedot-v1/T1."""
    read: Readers = {"numbers": int, "settings": parse_settings, "needs": lambda text: tuple(text.split())}
    read |= {"wants": lambda text: tuple(tomllib.loads(f"all = {text}")["all"]) if text else ()}
    return {item.name: item for item in _read("items", Item, read)}


@cache
def numbers() -> dict[str, tuple[PrintedNumber, ...]]:
    """Return the numbers of each table and figure in the order of print."""
    read: Readers = {"value": float, "line": int, "settings": parse_settings}
    read |= {"deviation": lambda text: float(text) if text else None}
    printed: dict[str, list[PrintedNumber]] = {name: [] for name in items()}
    for document in dict.fromkeys(item.document for item in items().values()):
        for number in _read(document, PrintedNumber, read):
            printed[number.name].append(number)
    return {name: tuple(cells) for name, cells in printed.items()}


def _read(name: str, kind: type[Row], read: Readers) -> list[Row]:
    """Read a file of the papers' numbers, which tests check."""
    with (papers_folder() / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [kind(**{key: read.get(key, str)(text) for key, text in row.items()}) for row in csv.DictReader(file)]


def find_item(name: str) -> Item:
    known_items = items()
    if name not in known_items:
        lower = {item_name.lower(): item_name for item_name in known_items}
        similar = [lower[item_name] for item_name in get_close_matches(name.lower(), lower, 3, 0.5)]
        nearest = f"the nearest are {', '.join(similar)}; " if similar else ""
        raise SettingsError(f"no table or figure is called {name!r}; {nearest}`fedvlm list papers --json` names all")
    return known_items[name]


@cache
def parse_settings(text: str) -> Values:
    """`method.blocks = 4, method.head = 'text'` by dotted names."""
    return flatten(tomllib.loads(f"all = {{{text}}}")["all"])


def differences(expected: Values, identity: Mapping[str, Any]) -> list[str]:
    """Return the settings in which a run's identity differs from those expected."""
    return flat_differences(expected, flatten(identity))


def flat_differences(expected: Values, settings: Values) -> list[str]:
    """Return the differences of settings by dotted names."""
    out = []
    for key, value in expected.items():
        actual = settings.get(key)
        same = actual == value or (isinstance(actual, tuple) and list(actual) == value)
        if key == "encoder" and isinstance(actual, str):  # a local copy has another path
            same = same or actual.rpartition("/")[2] == str(value).rpartition("/")[2]
        if not same:
            out.append(f"{key} is {actual!r}, not {value!r}")
    return out


def matches_method(number: PrintedNumber, identity: Mapping[str, Any]) -> bool:
    """Whether a run has the method and settings that a number is printed for."""
    if not number.method:
        return number.of_data
    method_settings = {key: value for key, value in number.settings.items() if key.startswith("method.")}
    return not differences({"method.name": number.method, **method_settings}, identity)


def incomparable_reason(number: PrintedNumber, identity: Mapping[str, Any]) -> str:
    """Return why a run cannot be compared with a number; empty if it can."""
    if identity.get("smoke"):
        return "a smoke run"
    expected = {"data": number.data, **find_item(number.name).settings, **number.settings}
    if not number.method and not number.of_data:
        return "the paper names no single method"
    expected |= {"method.name": number.method} if number.method else {}
    return "; ".join(differences(expected, identity))


def verdict_word(
    measured: float,
    measured_std: float | None,
    printed: float,
    printed_std: float | None,
    lower_is_better: bool = False,
    default_noise: float = 1.0,
) -> VerdictWord:
    """Compare a measured number with a printed one in the same unit.

    The noise is two standard deviations of the difference, or `default_noise` where none is printed. A number that is
    better by more than twice the noise is suspicious: test samples may have leaked.
    """
    noise = default_noise if printed_std is None else 2 * hypot(measured_std or 0.0, printed_std)
    gain = printed - measured if lower_is_better else measured - printed
    if gain >= 0:
        return "suspicious" if gain > 2 * (noise or default_noise) else "met"
    return "within noise" if -gain <= noise else "differs"


def judge_number(number: PrintedNumber, measured: float, std: float | None, identity: Mapping[str, Any]) -> Verdict:
    """Judge what a run gives where a number is printed; accuracies in per cent."""
    if obstacle := incomparable_reason(number, identity):
        return Verdict("not comparable", obstacle)
    if number.status == "void":
        return Verdict("void", number.reason)
    default_noise = abs(number.value) / 100 if is_unscaled(number.column) else 1.0
    lower = number.column.startswith(LOWER_IS_BETTER)
    word = verdict_word(measured, std, number.value, number.deviation, lower, default_noise)
    return Verdict(word, number.reason if number.status == "copied" else "")


State = Literal["full", "partly", "not"]
STATES: tuple[State, ...] = ("full", "partly", "not")
# Which of the pictures that items ask for there are; what is built is added here.
OTHER_FEATURES = ("plot:plans", "plot:kite", "column:gain")
# Pictures of `fedvlm plot` that items know by another name.
PLOT_ALIASES = {"plot:counts": "sweep", "plot:partition-by-domain": "partition"}
PLOT_ALIASES |= {"plot:tsne-by-superclass": "tsne", "plot:heat-of-one-prompt": "heat"}


@dataclass(frozen=True)
class CoveredItem:
    """An item, whether its experiments run all of it, and what is missing."""

    item: Item
    state: State
    experiments: tuple[str, ...]
    missing: tuple[str, ...]


def available_features() -> set[str]:
    """Return the columns, plots and partitions that items may need."""
    columns = {f"column:{name}" for name in COLUMNS}
    plots = {*(f"plot:{kind}" for kind in PLOTS), *(key for key in PLOT_ALIASES if PLOT_ALIASES[key] in PLOTS)}
    return {*OTHER_FEATURES, *columns, *plots, *(f"clients:{way}" for way in get_args(PartitionKind))}


def expected_runs(item: Item) -> list[Values]:
    """Return the settings of the runs that an item consists of."""
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
    """Return how much of an item the runs of its experiments cover; runs are identities."""
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
    """Return the identities of the runs of the experiments that reproduce an item."""
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
    """Return the coverage of all tables and figures."""
    named = runs_by_item()
    return tuple(item_coverage(item, named[name]) for name, item in items().items())


def coverage() -> list[dict[str, Any]]:
    """Return a row per document and one for all; full means that it runs as published.

    "on real data" counts items that were run on the data of the paper.
    """
    out = []
    for document in (*dict.fromkeys(covered.item.document for covered in all_coverage()), "all"):
        selected = [covered for covered in all_coverage() if document in ("all", covered.item.document)]
        row: dict[str, Any] = {"document": document, "items": len(selected)}
        row |= {state: sum(covered.state == state for covered in selected) for state in STATES}
        row["on real data"] = sum(bool(covered.item.run) for covered in selected)
        row["numbers"] = sum(covered.item.numbers for covered in selected)
        out.append({**row, "detail": [_detail(covered) for covered in selected]})
    return out


def _detail(covered: CoveredItem) -> dict[str, Any]:
    item = {"item": covered.item.name, "what": covered.item.title, "state": covered.state}
    return {**item, "experiments": list(covered.experiments), "lacks": list(covered.missing)}


def settings_of_item(
    name: str, overrides: Mapping[str, Any], assignments: Sequence[str] = ()
) -> tuple[list[str], list[Settings]]:
    """Return the experiments that reproduce an item, and those of their runs that it consists of.

    `given` and assignments, as `--set` has them, are laid over the settings of each; other data are
    read in their own way. Runs that this makes the same are one.
    """
    item = find_item(name)
    rows = [{k: v for k, v in row.items() if k != "encoder"} for row in expected_runs(item)]
    named: list[str] = []
    settings_by_identity: dict[str, Settings] = {}
    for experiment, path in experiments().items():
        values = read_toml(path)
        if item.name not in values.get("reproduces", ()):
            continue
        named.append(experiment)
        for run_values in experiment_runs(values):
            identity = flatten(build(run_values).identity())
            if all(flat_differences(row, identity) for row in rows):
                continue
            merged = {**run_values, **overrides}
            if overrides.get("data", run_values["data"]) != run_values["data"]:
                merged.pop("source", None)
            settings = build(override(merged, assignments))
            settings_by_identity.setdefault(repr(settings.identity()), settings)
    if not settings_by_identity:
        remedy = "`fedvlm list papers --json` says what it lacks"
        raise SettingsError(f"no experiment runs {item.name} ({item.title}) yet; {remedy}")
    return named, list(settings_by_identity.values())
