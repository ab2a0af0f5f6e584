"""A grid over settings: its points, and all of them run though one may fail."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from fedvlm.channel.settings import Channel
from fedvlm.core import methods
from fedvlm.data.clients import Clients
from fedvlm.errors import FedVLMError, SettingsError, unknown
from fedvlm.record import Record
from fedvlm.runner.settings import Settings, build, laid, value_of
from fedvlm.storage.toml import flat

Grid = dict[str, list[Any]]  # values by dotted names
IDLE = ("workers", "access", "reproduces")  # settings that decide no number
OPEN = ("source",)  # tables whose names are not listed anywhere


def read_sweep(texts: Iterable[str]) -> Grid:
    """`a.b=1,2,3` of the command line; values are TOML, or else plain words."""
    found: Grid = {}
    for text in texts:
        path, equals, raw = text.partition("=")
        if not equals or not path.strip() or not raw.strip():
            raise SettingsError(f"--sweep {text!r} is not of the form a.b=1,2,3")
        try:
            each = tomllib.loads(f"each = [{raw}]")["each"]
        except tomllib.TOMLDecodeError:
            each = [value_of(word) for word in raw.split(",")]
        found[path.strip()] = each
    return grid(found)


def grid(table: Any) -> Grid:
    """The values of every swept setting: one or more, of one type, each once."""
    if not isinstance(table, Mapping):
        raise SettingsError(f'sweep = {table!r}; write a table, as "method.blocks" = [1, 2, 4]')
    found = flat(table)
    for key, each in found.items():
        if not isinstance(each, list | tuple) or not each:
            raise SettingsError(f"sweep: {key} = {each!r}; it takes a list of values, as [1, 2, 4]")
        if len(kinds := {_kind(one): one for one in each}) > 1:
            both = " and ".join(f"{one!r} ({kind})" for kind, one in kinds.items())
            raise SettingsError(
                f"sweep: {key} = {list(each)} has values of mixed types, {both}; give values of "
                "one type, and sweep the others by themselves"
            )
        if any(one in each[:place] for place, one in enumerate(each)):
            raise SettingsError(f"sweep: {key} = {list(each)} has a value twice; name each once")
    return {key: list(each) for key, each in found.items()}


def _kind(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if number else type(value).__name__


def expand(rows: Sequence[Mapping[str, Any]], over: Grid) -> list[dict[str, Any]]:
    """Every row at every point; a method without a swept setting of methods is at one of them."""
    names = [_names(row) for row in rows]
    for key in over:
        known = {name for one in names for name in one}
        if key not in known and key.partition(".")[0] not in OPEN:
            raise unknown("setting to sweep", key, known)
    out = []
    for row, known in zip(rows, names, strict=True):
        mine = [key for key in over if key in known or key.partition(".")[0] in OPEN]
        for values in product(*(over[key] for key in mine)):
            one = dict(row)
            for key, value in zip(mine, values, strict=True):
                alone = key == "seeds" and isinstance(value, int)  # a seed to each point
                one = laid(one, key, [value] if alone else value)
            out.append(one)
    return out


def _names(row: Mapping[str, Any]) -> set[str]:
    """All settings that a row may be swept over, by dotted names."""
    parts: dict[str, Any] = {"clients": Clients, "channel": Channel}
    for key in ("method", "warm_start"):
        value = row.get(key)
        name = value.get("name") if isinstance(value, Mapping) else value
        kind = methods().get(name) if isinstance(name, str) else value
        if kind is not None:
            parts[key] = kind
    found = {one.name for one in fields(Settings) if one.name not in IDLE}
    return found | {f"{key}.{one.name}" for key, kind in parts.items() for one in fields(kind)}


def built(rows: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> list[Settings]:
    """Settings of rows; a point that cannot be is named, before any is run."""
    out = []
    for row in rows:
        try:
            out.append(build(row))
        except SettingsError as error:
            at = point(flat(row), swept)
            raise SettingsError(f"at {at}: {error}" if at else str(error)) from error
    return out


def point(values: Mapping[str, Any], swept: Sequence[str]) -> str:
    """Where in a grid a run is, of its settings by dotted names."""
    return ", ".join(f"{key}={values[key]}" for key in swept if key in values)


def run_all(
    settings: Sequence[Settings],
    swept: Sequence[str],
    run: Callable[[Sequence[Settings], bool], Sequence[Record | Exception]],
    enduring: bool = False,
) -> tuple[list[Record], list[str]]:
    """The runs that could be finished, and what hindered the others, each by its name.

    `run` has them all together, and is told whether one that cannot begin is to be endured.
    Without a sweep a failure is raised, unless they are to endure it.
    """
    enduring = enduring or bool(swept)
    done: list[Record] = []
    failed: list[str] = []
    for one, found in zip(settings, run(settings, enduring), strict=True):
        if not isinstance(found, Exception):
            done.append(found)
            continue
        if not enduring:
            raise found
        kind = "" if isinstance(found, FedVLMError) else f"{type(found).__name__}: "
        at = point(flat(one.identity()), swept)
        name = f"{one.method.name} at {at}" if at else one.method.name
        failed.append(f"{name} failed: {kind}{found}")
    if failed and not done:
        raise FedVLMError("every run failed; the first: " + failed[0])
    return done, failed
