"""Which runs a table or figure of a paper consists of, by the experiments that name it."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedvlm.errors import SettingsError
from fedvlm.report.coverage import expected_runs
from fedvlm.report.papers import find_item, flat_differences
from fedvlm.runner.experiments import experiment_runs
from fedvlm.runner.named import experiments
from fedvlm.runner.settings import Settings, build, override, read_toml
from fedvlm.storage.toml import flatten


def settings_of_item(
    name: str, overrides: Mapping[str, Any], assignments: Sequence[str] = ()
) -> tuple[list[str], list[Settings]]:
    """The experiments that reproduce an item, and those of their runs that it consists of.

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
        raise SettingsError(
            f"no experiment runs {item.name} ({item.title}) yet; `fedvlm list papers --json` says what it lacks"
        )
    return named, list(settings_by_identity.values())
