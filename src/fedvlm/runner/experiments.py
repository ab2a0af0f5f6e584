"""The runs of an experiment's file: its methods, at the points of its sweep."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedvlm.errors import SettingsError, renamed, unknown_name
from fedvlm.runner.settings import override
from fedvlm.runner.sweep import Grid, expand, read_grid

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
