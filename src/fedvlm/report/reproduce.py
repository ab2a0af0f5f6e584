"""Which runs a table or figure of a paper consists of, by the experiments that name it."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedvlm.errors import SettingsError
from fedvlm.report.coverage import wanted
from fedvlm.report.papers import apart, find
from fedvlm.runner.experiments import runs
from fedvlm.runner.named import experiments
from fedvlm.runner.settings import Settings, build, override, read_toml
from fedvlm.storage.toml import flat


def settings_of_item(
    name: str, given: Mapping[str, Any], assignments: Sequence[str] = ()
) -> tuple[list[str], list[Settings]]:
    """The experiments that reproduce an item, and those of their runs that it consists of.

    `given` and assignments, as `--set` has them, are laid over the settings of each; other data are
    read in their own way. Runs that this makes the same are one.
    """
    item = find(name)
    rows = [{k: v for k, v in row.items() if k != "encoder"} for row in wanted(item)]
    named: list[str] = []
    found: dict[str, Settings] = {}
    for experiment, path in experiments().items():
        values = read_toml(path)
        if item.name not in values.get("reproduces", ()):
            continue
        named.append(experiment)
        for one in runs(values):
            identity = flat(build(one).identity())
            if all(apart(row, identity) for row in rows):
                continue
            own = {**one, **given}
            if given.get("data", one["data"]) != one["data"]:
                own.pop("source", None)
            settings = build(override(own, assignments))
            found.setdefault(repr(settings.identity()), settings)
    if not found:
        raise SettingsError(
            f"no experiment runs {item.name} ({item.what}) yet; `fedvlm list papers --json` says "
            "what it lacks"
        )
    return named, list(found.values())
