"""The experiments that come with fedvlm: one TOML file each, with what a paper printed beside."""

from pathlib import Path

from fedvlm.errors import unknown_name


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
