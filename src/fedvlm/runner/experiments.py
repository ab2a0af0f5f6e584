"""Expand an experiment into runs: its methods, the points of its sweep, and its baselines."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from types import UnionType
from typing import Any, Union, get_args, get_origin

from fedvlm.channel.settings import Channel
from fedvlm.core import check_type, make, methods, tunable_settings
from fedvlm.data.clients import Clients
from fedvlm.errors import FedVLMError, SettingsError, unknown_name
from fedvlm.evaluate.protocols.contract import NEW_CLASS_PROTOCOLS
from fedvlm.record import Record
from fedvlm.runner.settings import (
    Settings,
    build,
    override,
    parse_value,
    protocol_setting_names,
    read_method,
    set_value,
)
from fedvlm.storage.files import flatten

Grid = dict[str, list[Any]]  # values by dotted names
EXPERIMENT_KEYS = ("title", "paper", "traffic", "baselines", "methods", "sweep")  # besides the settings of a run
# settings that cannot be swept
EXECUTION_SETTINGS = ("workers", "access", "purpose", "contact", "reproduces", "protocol_settings")
OPEN_TABLES = ("source",)  # tables whose keys are not known beforehand
METHOD_OPTIONS = ["warm_start", "tune", "descriptions", "texts", "selection", "fraction", "engine", "transductive"]
METHOD_OPTIONS += ["allow_small", "channel", "attack", "reproduces"]  # that baselines are run without
BASELINES = ("zero-shot", "alone", "pooled")


def lists_to_sweep(values: Mapping[str, Any]) -> dict[str, Any]:
    """Move lists of values for settings that take one, as `lr = [0.1, 0.01]`, to the sweep.

    A list of names for `method` becomes `[[methods]]`; a method table there with lists is repeated for each value.
    """
    out = dict(values)
    if isinstance(names := out.get("method"), list):
        out["methods"] = [table if isinstance(table, Mapping) else {"name": table} for table in names]
        del out["method"]
    candidates = {key: entry for key, entry in out.items() if key not in EXPERIMENT_KEYS}
    grid: Grid = {key: entry for key, entry in candidates.items() if _is_sweep(Settings, key, entry)}
    out = {key: entry for key, entry in out.items() if key not in grid}
    for table_name in ("clients", "channel", "method", "warm_start"):
        if isinstance(table := out.get(table_name), Mapping):
            swept = _swept_keys(table_name, table)
            grid |= {f"{table_name}.{key}": table[key] for key in swept}
            out[table_name] = {key: entry for key, entry in table.items() if key not in swept}
    if isinstance(tables := out.get("methods"), list):
        out["methods"] = [point for table in tables for point in _points(table)]
    written = read_grid(out.get("sweep", {}))
    if both := sorted(grid.keys() & written.keys()):
        raise SettingsError(f"{both[0]} has a list of values and is in [sweep], too; write one of them")
    return {**out, "sweep": {**written, **grid}} if grid else out


def _swept_keys(table_name: str, table: Mapping[str, Any]) -> list[str]:
    """Return the settings of a table that have a list of values although they take one."""
    kind: Any = {"clients": Clients, "channel": Channel}.get(table_name)
    if kind is None:
        name = table.get("name")
        kind = methods().get(name) if isinstance(name, str) else None
    return [] if kind is None else [key for key, value in table.items() if _is_sweep(kind, key, value)]


def _is_sweep(kind: Any, key: str, value: Any) -> bool:
    types = {setting.name: setting.type for setting in fields(kind)}
    if not isinstance(value, list) or key not in types or key in EXECUTION_SETTINGS:
        return False
    options = get_args(types[key]) if get_origin(types[key]) in (Union, UnionType) else (types[key],)
    return not any((get_origin(option) or option) in (tuple, list, dict) for option in options)


def _points(table: Any) -> list[Any]:
    """Return a method's table once for every combination of its lists."""
    keys = _swept_keys("methods", table) if isinstance(table, Mapping) else []
    grid = read_grid({key: table[key] for key in keys})
    return [{**table, **dict(zip(keys, point, strict=True))} for point in product(*grid.values())] if keys else [table]


def swept_grid(values: Mapping[str, Any], assignments: Iterable[str] = ()) -> Grid:
    """Return the grid of `[sweep]` without settings that are assigned."""
    fixed = {text.partition("=")[0].strip() for text in assignments}
    return {key: points for key, points in read_grid(values.get("sweep", {})).items() if key not in fixed}


def experiment_runs(values: Mapping[str, Any], assignments: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return the values of each run: one per method of `[[methods]]` and point of `[sweep]`.

    Assignments, as `--set` has them, are applied to every run.
    """
    assignments, values = list(assignments), lists_to_sweep(values)
    return expand(base_runs(values, assignments), swept_grid(values, assignments))


def base_runs(values: Mapping[str, Any], assignments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the values of each method before the sweep."""
    common = {key: value for key, value in values.items() if key not in EXPERIMENT_KEYS}
    method_tables = values.get("methods")
    if method_tables is not None and (not isinstance(method_tables, list) or not method_tables or "method" in common):
        raise SettingsError("methods must be a list of tables, [[methods]] each, without [method] beside it")
    runs = [common] if method_tables is None else [{**common, "method": table} for table in method_tables]
    return [override(run, assignments) for run in runs]


def to_file_values(experiment: Mapping[str, Any], method_rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return runs that differ only in their method as the values of one experiment file."""
    out = {key: experiment[key] for key in EXPERIMENT_KEYS if key in experiment and key != "methods"}
    if not out.get("sweep"):
        out.pop("sweep", None)
    out |= {key: value for key, value in method_rows[0].items() if key != "method"}
    method_tables = [table["method"] for table in method_rows]
    if len(method_tables) == 1:
        return {**out, "method": method_tables[0]}
    return {**out, "methods": [{"name": table} if isinstance(table, str) else table for table in method_tables]}


def read_sweep(texts: Iterable[str]) -> Grid:
    """Read `a.b=1,2,3` of the command line; values are TOML, or else plain words."""
    grid_values: Grid = {}
    for text in texts:
        path, equals, raw = text.partition("=")
        if not equals or not path.strip() or not raw.strip():
            raise SettingsError(f"--sweep {text!r} is not of the form a.b=1,2,3")
        try:
            values = tomllib.loads(f"values = [{raw}]")["values"]
        except tomllib.TOMLDecodeError:
            values = [parse_value(word) for word in raw.split(",")]
        grid_values[path.strip()] = values
    return read_grid(grid_values)


def read_grid(table: Any) -> Grid:
    """Read the values of every swept setting: one or more, of one type, each once."""
    if not isinstance(table, Mapping):
        raise SettingsError(f'sweep = {table!r}; write a table, as "method.blocks" = [1, 2, 4]')
    flat_values = flatten(table)
    for key, values in flat_values.items():
        if not isinstance(values, list | tuple) or not values:
            raise SettingsError(f"sweep: {key} must be a list of values, as [1, 2, 4]; got {values!r}")
        if len(kinds := {_type_name(value): value for value in values}) > 1:
            types_text = " and ".join(f"{value!r} ({kind})" for kind, value in kinds.items())
            raise SettingsError(f"sweep: {key} = {list(values)} has values of mixed types, {types_text}; use one type")
        if any(value in values[:place] for place, value in enumerate(values)):
            raise SettingsError(f"sweep: {key} = {list(values)} has a value twice; write each once")
    return {key: list(values) for key, values in flat_values.items()}


def _type_name(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if number else type(value).__name__


def expand(rows: Sequence[Mapping[str, Any]], over: Grid) -> list[dict[str, Any]]:
    """Return every row at every point of a grid; a method is not repeated over settings it does not have."""
    names = [_sweepable_names(row) for row in rows]
    for key in over:
        allowed = set[str]().union(*names)
        if key not in allowed and key.partition(".")[0] not in OPEN_TABLES:
            raise unknown_name("setting to sweep", key, allowed)
    out = []
    for row, allowed in zip(rows, names, strict=True):
        swept_keys = [key for key in over if key in allowed or key.partition(".")[0] in OPEN_TABLES]
        for values in product(*(over[key] for key in swept_keys)):
            run = dict(row)
            for key, value in zip(swept_keys, values, strict=True):
                is_seed = key == "seeds" and isinstance(value, int)  # one seed per point
                run = set_value(run, key, [value] if is_seed else value)
            out.append(run)
    return out


def _sweepable_names(row: Mapping[str, Any]) -> set[str]:
    """Return the dotted names of all settings that a row may be swept over."""
    parts: dict[str, Any] = {"clients": Clients, "channel": Channel}
    for key in ("method", "warm_start"):
        if row.get(key) is not None:
            parts[key] = read_method(row[key])
    names = {setting.name for setting in fields(Settings)} - set(EXECUTION_SETTINGS) | protocol_setting_names(row)
    return names | {f"{key}.{setting.name}" for key, kind in parts.items() for setting in fields(kind)}


def build_all(rows: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> list[Settings]:
    """Build the settings of all rows; name the point of the sweep that is refused, before any run."""
    out = []
    for row in rows:
        try:
            out.append(build(row))
        except SettingsError as error:
            at = describe_point(flatten(row), swept)
            raise SettingsError(f"at {at}: {error}" if at else str(error)) from error
    return tune_where_possible(out)


def tune_where_possible(runs: Sequence[Settings]) -> list[Settings]:
    """Return the runs without settings to tune that a method lacks, if another of the runs has them."""
    tunable = set[str]().union(*(tunable_settings(run.method) for run in runs))
    out = []
    for run in runs:
        missing = {name for name in run.tune if name in tunable and name not in tunable_settings(run.method)}
        out.append(replace(run, tune=tuple(name for name in run.tune if name not in missing)) if missing else run)
    return out


def describe_point(values: Mapping[str, Any], swept: Sequence[str]) -> str:
    """Return the swept settings of a run, from its values by dotted names."""
    return ", ".join(f"{key}={values[key]}" for key in swept if key in values)


def split_outcomes(
    settings: Sequence[Settings],
    outcomes: Sequence[Record | Exception],
    swept: Sequence[str] = (),
    keep_going: bool = False,
) -> tuple[list[Record], list[str]]:
    """Return the records of finished runs and a message for each failed one.

    Raise the first failure if there is no sweep, unless `keep_going`; raise if all runs failed.
    """
    done: list[Record] = []
    failed: list[str] = []
    for run_settings, outcome in zip(settings, outcomes, strict=True):
        if not isinstance(outcome, Exception):
            done.append(outcome)
            continue
        if not (keep_going or swept):
            raise outcome
        kind = "" if isinstance(outcome, FedVLMError) else f"{type(outcome).__name__}: "
        at = describe_point(flatten(run_settings.identity()), swept)
        name = f"{run_settings.method.name} at {at}" if at else run_settings.method.name
        failed.append(f"{name} failed: {kind}{outcome}")
    if failed and not done:
        raise FedVLMError("every run failed; the first: " + failed[0])
    return done, failed


def wants_baselines(values: Mapping[str, Any]) -> bool:
    """Return `baselines`; by default they are run unless the experiment has a paper's table to compare with."""
    if "baselines" in values:
        check_type("baselines", values["baselines"], bool)
        return bool(values["baselines"])
    return not (values.get("reproduces") or values.get("paper"))


def missing_baselines(settings: Sequence[Settings], done: Record) -> list[Settings]:
    """Return the baselines that runs of one data set lack; `done` is one of these runs.

    They have none of the methods' settings (channel, descriptions, …), so that they are the same runs for all.
    """
    existing = {run_settings.method.name for run_settings in settings}
    if done.manifest["text"] is None:
        existing.add("zero-shot")
    if settings[0].protocol in NEW_CLASS_PROTOCOLS:
        existing |= {"alone", "pooled"}  # they cannot predict new classes
    default = Settings(settings[0].method)
    plain = replace(settings[0], **{name: getattr(default, name) for name in METHOD_OPTIONS})
    return [replace(plain, method=make(name)) for name in BASELINES if name not in existing]
