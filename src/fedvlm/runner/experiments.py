"""The runs of an experiment's file: its methods, at the points of its sweep."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

from fedvlm.channel.settings import Channel
from fedvlm.core import check_type, make, methods
from fedvlm.data.clients import Clients
from fedvlm.errors import FedVLMError, SettingsError, renamed, unknown_name
from fedvlm.evaluate.protocols.base_to_new import BaseToNew
from fedvlm.record import Record
from fedvlm.runner.settings import Settings, build, override, parse_value, set_value
from fedvlm.storage.files import flatten

Grid = dict[str, list[Any]]  # values by dotted names
# What an experiment says besides the settings of a run.
EXPERIMENT_KEYS = ("title", "paper", "traffic", "baselines", "methods", "sweep")


def swept_grid(values: Mapping[str, Any], assignments: Iterable[str] = ()) -> Grid:
    """What `[sweep]` goes over; a setting that is assigned is not swept."""
    fixed = {text.partition("=")[0].strip() for text in assignments}
    full_grid = read_grid(values.get("sweep", {}))
    return {key: points for key, points in full_grid.items() if key not in fixed}


def experiment_runs(values: Mapping[str, Any], assignments: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The settings of each run: one per method of `[[methods]]` and per point of `[sweep]`.

    Assignments, as `--set` has them, are laid over every one of them.
    """
    assignments = list(assignments)
    return expand(base_runs(values, assignments), swept_grid(values, assignments))


def base_runs(values: Mapping[str, Any], assignments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The settings of each method, as they are before a sweep goes over them."""
    if (strange := next((key for key in values if renamed(key, EXPERIMENT_KEYS)), None)) is not None:
        raise unknown_name("setting of an experiment", strange, EXPERIMENT_KEYS)
    common = {key: value for key, value in values.items() if key not in EXPERIMENT_KEYS}
    method_tables = values.get("methods")
    if method_tables is not None and (not isinstance(method_tables, list) or not method_tables or "method" in common):
        raise SettingsError("methods is a list of tables, [[methods]] each, and without [method]")
    method_values = [common] if method_tables is None else [{**common, "method": table} for table in method_tables]
    return [override(table, assignments) for table in method_values]


def to_file_values(notes: Mapping[str, Any], method_rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The other way: rows that differ in their method only, as the values of one file."""
    out = {key: notes[key] for key in EXPERIMENT_KEYS if key in notes and key != "methods"}
    if not out.get("sweep"):
        out.pop("sweep", None)
    out |= {key: value for key, value in method_rows[0].items() if key != "method"}
    method_tables = [table["method"] for table in method_rows]
    if len(method_tables) == 1:
        return {**out, "method": method_tables[0]}
    return {**out, "methods": [{"name": table} if isinstance(table, str) else table for table in method_tables]}


EXECUTION_SETTINGS = ("workers", "access", "reproduces")  # settings that decide no number
OPEN_TABLES = ("source",)  # tables whose names are not listed anywhere


def read_sweep(texts: Iterable[str]) -> Grid:
    """`a.b=1,2,3` of the command line; values are TOML, or else plain words."""
    grid_values: Grid = {}
    for text in texts:
        path, equals, raw = text.partition("=")
        if not equals or not path.strip() or not raw.strip():
            raise SettingsError(f"--sweep {text!r} is not of the form a.b=1,2,3")
        try:
            values = tomllib.loads(f"each = [{raw}]")["each"]
        except tomllib.TOMLDecodeError:
            values = [parse_value(word) for word in raw.split(",")]
        grid_values[path.strip()] = values
    return read_grid(grid_values)


def read_grid(table: Any) -> Grid:
    """The values of every swept setting: one or more, of one type, each once."""
    if not isinstance(table, Mapping):
        raise SettingsError(f'sweep = {table!r}; write a table, as "method.blocks" = [1, 2, 4]')
    flat_values = flatten(table)
    for key, values in flat_values.items():
        if not isinstance(values, list | tuple) or not values:
            raise SettingsError(f"sweep: {key} = {values!r}; it takes a list of values, as [1, 2, 4]")
        if len(kinds := {_type_name(value): value for value in values}) > 1:
            types_text = " and ".join(f"{value!r} ({kind})" for kind, value in kinds.items())
            raise SettingsError(
                f"sweep: {key} = {list(values)} has values of mixed types, {types_text}; give values of "
                "one type, and sweep the others by themselves"
            )
        if any(value in values[:place] for place, value in enumerate(values)):
            raise SettingsError(f"sweep: {key} = {list(values)} has a value twice; name each once")
    return {key: list(values) for key, values in flat_values.items()}


def _type_name(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if number else type(value).__name__


def expand(rows: Sequence[Mapping[str, Any]], over: Grid) -> list[dict[str, Any]]:
    """Every row at every point; a method without a swept setting of methods is at one of them."""
    names = [_sweepable_names(row) for row in rows]
    for key in over:
        allowed = {name for entry in names for name in entry}
        if key not in allowed and key.partition(".")[0] not in OPEN_TABLES:
            raise unknown_name("setting to sweep", key, allowed)
    out = []
    for row, allowed in zip(rows, names, strict=True):
        swept_keys = [key for key in over if key in allowed or key.partition(".")[0] in OPEN_TABLES]
        for values in product(*(over[key] for key in swept_keys)):
            entry = dict(row)
            for key, value in zip(swept_keys, values, strict=True):
                alone = key == "seeds" and isinstance(value, int)  # a seed to each point
                entry = set_value(entry, key, [value] if alone else value)
            out.append(entry)
    return out


def _sweepable_names(row: Mapping[str, Any]) -> set[str]:
    """All settings that a row may be swept over, by dotted names."""
    parts: dict[str, Any] = {"clients": Clients, "channel": Channel}
    for key in ("method", "warm_start"):
        value = row.get(key)
        name = value.get("name") if isinstance(value, Mapping) else value
        kind = methods().get(name) if isinstance(name, str) else value
        if kind is not None:
            parts[key] = kind
    setting_names = {setting.name for setting in fields(Settings) if setting.name not in EXECUTION_SETTINGS}
    return setting_names | {f"{key}.{setting.name}" for key, kind in parts.items() for setting in fields(kind)}


def build_all(rows: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> list[Settings]:
    """Settings of rows; a point that cannot be is named, before any is run."""
    out = []
    for row in rows:
        try:
            out.append(build(row))
        except SettingsError as error:
            at = describe_point(flatten(row), swept)
            raise SettingsError(f"at {at}: {error}" if at else str(error)) from error
    return out


def describe_point(values: Mapping[str, Any], swept: Sequence[str]) -> str:
    """Where in a grid a run is, of its settings by dotted names."""
    return ", ".join(f"{key}={values[key]}" for key in swept if key in values)


def run_all(
    settings: Sequence[Settings],
    swept: Sequence[str],
    run: Callable[[Sequence[Settings], bool], Sequence[Record | Exception]],
    keep_going: bool = False,
) -> tuple[list[Record], list[str]]:
    """The runs that could be finished, and what hindered the others, each by its name.

    `run` has them all together, and is told whether one that cannot begin is to be endured.
    Without a sweep a failure is raised, unless they are to endure it.
    """
    keep_going = keep_going or bool(swept)
    done: list[Record] = []
    failed: list[str] = []
    for run_settings, outcome in zip(settings, run(settings, keep_going), strict=True):
        if not isinstance(outcome, Exception):
            done.append(outcome)
            continue
        if not keep_going:
            raise outcome
        kind = "" if isinstance(outcome, FedVLMError) else f"{type(outcome).__name__}: "
        at = describe_point(flatten(run_settings.identity()), swept)
        name = f"{run_settings.method.name} at {at}" if at else run_settings.method.name
        failed.append(f"{name} failed: {kind}{outcome}")
    if failed and not done:
        raise FedVLMError("every run failed; the first: " + failed[0])
    return done, failed


BASELINES = ("zero-shot", "alone", "pooled")


def wants_baselines(values: Mapping[str, Any]) -> bool:
    """As `baselines` says; without it, unless an experiment stands beside a paper's own table."""
    if "baselines" in values:
        check_type("baselines", values["baselines"], bool)
        return bool(values["baselines"])
    return not (values.get("reproduces") or values.get("paper"))


def missing_baselines(settings: Sequence[Settings], done: Record) -> list[Settings]:
    """The bars that runs of one data set lack; `done` is one of these runs.

    Nothing of a method's own (channel, descriptions, …) is in them, so that they are the same runs
    whatever they stand beside.
    """
    existing = {run_settings.method.name for run_settings in settings}
    if done.manifest["text"] is None:
        existing.add("zero-shot")
    if settings[0].protocol == BaseToNew.name:
        existing |= {"alone", "pooled"}  # they know no new class
    plain = replace(
        settings[0],
        warm_start=None,
        tune=(),
        descriptions="",
        texts="",
        selection="last",
        fraction=1.0,
        engine="batched",
        allow_small=False,
        channel=Channel(),
        attack="none",
        reproduces=(),
    )
    return [replace(plain, method=make(name)) for name in BASELINES if name not in existing]
