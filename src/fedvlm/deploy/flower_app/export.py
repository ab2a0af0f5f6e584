"""Write a plain Flower app that runs one experiment; it uses Flower by its public interface alone."""

from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from fedvlm.deploy.flower_app import check_exportable
from fedvlm.errors import DataError
from fedvlm.runner.settings import Settings
from fedvlm.storage.files import to_toml, write_file

PACKAGE = "fedvlm_app"
FILES = {  # by the name of the template, a text file in `template/`
    **{name: name for name in ("pyproject.toml", "README.md")},
    **{name: f"{PACKAGE}/{name}" for name in ("__init__.py", "client_app.py", "records.py", "server_app.py")},
}


def export_flower_app(settings: Settings, folder: Path) -> None:
    check_exportable(settings)
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty; choose a new folder")
    values = {**settings.identity(), "access": settings.access}
    for key in ("data", "encoder", "descriptions", "texts"):  # the app runs in another folder
        kind, colon, path = values[key].rpartition(":")
        if path and Path(path).exists():
            values[key] = f"{kind}{colon}{Path(path).resolve()}"
    write_file(folder / PACKAGE / "experiment.toml", to_toml(values).encode())
    for name, place in FILES.items():
        text = Template((files("fedvlm.deploy.flower_app") / "template" / f"{name}.txt").read_text("utf-8"))
        words = {"method": settings.method.name, "version": version("fedvlm")}
        write_file(folder / place, text.substitute(words).encode())
