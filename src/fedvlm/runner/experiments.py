"""The runs of an experiment's file: its methods, at the points of its sweep."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedvlm.errors import SettingsError, renamed, unknown
from fedvlm.runner.settings import override
from fedvlm.runner.sweep import Grid, expand, grid

# What an experiment says besides the settings of a run.
NOTES = ("title", "paper", "traffic", "baselines", "methods", "sweep")


def swept(values: Mapping[str, Any], assignments: Iterable[str] = ()) -> Grid:
    """What `[sweep]` goes over; a setting that is assigned is not swept."""
    fixed = {text.partition("=")[0].strip() for text in assignments}
    found = grid(values.get("sweep", {}))
    return {key: each for key, each in found.items() if key not in fixed}


def runs(values: Mapping[str, Any], assignments: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The settings of each run: one per method of `[[methods]]` and per point of `[sweep]`.

    Assignments, as `--set` has them, are laid over every one of them.
    """
    assignments = list(assignments)
    return expand(unswept(values, assignments), swept(values, assignments))


def unswept(values: Mapping[str, Any], assignments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The settings of each method, as they are before a sweep goes over them."""
    if (strange := next((key for key in values if renamed(key, NOTES)), None)) is not None:
        raise unknown("setting of an experiment", strange, NOTES)
    common = {key: value for key, value in values.items() if key not in NOTES}
    many = values.get("methods")
    if many is not None and (not isinstance(many, list) or not many or "method" in common):
        raise SettingsError("methods is a list of tables, [[methods]] each, and without [method]")
    every = [common] if many is None else [{**common, "method": one} for one in many]
    return [override(one, assignments) for one in every]


def whole(notes: Mapping[str, Any], each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The other way: rows that differ in their method only, as the values of one file."""
    out = {key: notes[key] for key in NOTES if key in notes and key != "methods"}
    if not out.get("sweep"):
        out.pop("sweep", None)
    out |= {key: value for key, value in each[0].items() if key != "method"}
    many = [one["method"] for one in each]
    if len(many) == 1:
        return {**out, "method": many[0]}
    return {**out, "methods": [{"name": one} if isinstance(one, str) else one for one in many]}
