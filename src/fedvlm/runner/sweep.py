"""A grid over settings: its points, and all of them run though one may fail."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from fedvlm.channel.settings import Channel
from fedvlm.core import methods
from fedvlm.data.clients import Clients
from fedvlm.errors import FedVLMError, SettingsError, unknown_name
from fedvlm.record import Record
from fedvlm.runner.settings import Settings, build, parse_value, set_value
from fedvlm.storage.files import flatten

Grid = dict[str, list[Any]]  # values by dotted names
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
