"""The experiments that come with fedvlm: one TOML file each, with what a paper printed beside."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvlm.errors import SettingsError, unknown

NOTES = ("title", "paper", "traffic", "bars")  # what an experiment says besides settings


def folders() -> list[Path]:
    """In an installed package they lie inside it, in a checkout beside `src`."""
    package = Path(__file__).resolve().parents[1]
    return [package / "experiment_files", package.parents[1] / "experiments"]


def experiments() -> dict[str, Path]:
    for folder in folders():
        if files := sorted(folder.glob("*.toml")):
            return {path.stem: path for path in files}
    return {}


def find(name: str) -> Path:
    """A TOML file by its path, or an experiment by its name."""
    path = Path(name)
    if path.suffix == ".toml":
        return path
    known = experiments()
    if name not in known:
        raise unknown("experiment", name, known)
    return known[name]


def runs(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of each run: `[[methods]]` asks for one run per method, all else alike."""
    common = {key: value for key, value in values.items() if key not in (*NOTES, "methods")}
    many = values.get("methods")
    if many is None:
        return [common]
    if not isinstance(many, list) or not many or "method" in common:
        raise SettingsError("methods is a list of tables, [[methods]] each, and without [method]")
    return [{**common, "method": one} for one in many]


def whole(notes: Mapping[str, Any], each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The other way: runs that differ in their method only, as the values of one file."""
    out = {key: notes[key] for key in NOTES if key in notes}
    out |= {key: value for key, value in each[0].items() if key != "method"}
    many = [one["method"] for one in each]
    if len(many) == 1:
        return {**out, "method": many[0]}
    return {**out, "methods": [{"name": one} if isinstance(one, str) else one for one in many]}
