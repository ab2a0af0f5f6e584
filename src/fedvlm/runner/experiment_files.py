"""Find and read the TOML files of experiments: those that come with fedvlm, and a user's own."""

import tomllib
from pathlib import Path
from typing import Any

from fedvlm.errors import SettingsError, suggest_path, unknown_name


def experiment_folders() -> list[Path]:
    """Return where experiments may be: inside an installed package, or beside `src` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return [package / "experiment_files", package.parents[1] / "experiments"]


def experiments() -> dict[str, Path]:
    for folder in experiment_folders():
        if files := sorted(folder.glob("*.toml")):
            return {path.stem: path for path in files}
    return {}


def find_experiment(name: str) -> Path:
    """A TOML file by its path, or an experiment by its name."""
    path = Path(name)
    if path.suffix == ".toml":
        return path
    paths = experiments()
    if name not in paths:
        raise unknown_name("experiment", name, paths)
    return paths[name]


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        remedy = f"{suggest_path(path)}name a .toml file, or an experiment (`fedvlm list experiments`)"
        raise SettingsError(f"there is no settings file {path}; {remedy}") from error
    except OSError as error:
        raise SettingsError(f"{path} cannot be read ({error.strerror}); name a .toml file that can") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error
