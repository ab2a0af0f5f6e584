"""Write a plain Flower app that runs one experiment; it uses Flower by its public interface alone."""

from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from fedvlm.deploy.flower_app import check_exportable
from fedvlm.errors import DataError
from fedvlm.runner.settings import Settings
from fedvlm.storage.files import to_toml, write_file

PACKAGE = "fedvlm_app"
FILES = ("client_app.py", "records.py", "server_app.py")  # stored as text: they import a package that is not there yet
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedvlm-app"
version = "1.0.0"
description = "{method} of fedvlm, as a plain Flower app"
license = "Apache-2.0"
dependencies = ["fedvlm[flower]=={version}"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "fedvlm"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
min-nodes = 2     # wait for as many
wait = 120.0      # seconds
timeout = 3600.0  # seconds that a node has for one message
quorum = 1.0      # fraction of the nodes that must answer a round
out = ""          # folder of the record, where the ServerApp runs; empty: only the table is printed
"""
README = """\
# {method} of fedvlm, as a Flower app

Install `fedvlm[flower]=={version}` at the server and at every node, then `flwr run . YOUR-SUPERLINK --stream`.
{package}/experiment.toml has the settings. A node is one client:

- with `--node-config "partition-id=0"` (a simulation sets it) its part of the experiment's data;
- with `--node-config "data='IMAGES' client='NAME'"` its own images, one folder per class. `[source] classes` in
  experiment.toml then names all classes. Also `encoder='...'`, and `save='FOLDER'` for the node's own classifier.

Uploads, scores and numbers of samples go to the server. Images, embeddings and local tensors stay at the node. There is
no policy, ledger or consent of fedvlm on a federation of plain Flower: use `fedvlm deploy` for these.
"""


def export_flower_app(settings: Settings, folder: Path) -> list[Path]:
    """Write the app into a new folder, and return its files."""
    check_exportable(settings)
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty; choose a new folder")
    identity = settings.identity()
    if Path(settings.data).exists():
        identity["data"] = str(Path(settings.data).resolve())
    words = {"method": settings.method.name, "version": version("fedvlm"), "package": PACKAGE}
    contents = {
        "pyproject.toml": PROJECT.format(**words),
        "README.md": README.format(**words),
        f"{PACKAGE}/__init__.py": f'"""{settings.method.name} of fedvlm, over Flower."""\n',
        f"{PACKAGE}/experiment.toml": to_toml(identity),
    }
    template = files("fedvlm.deploy.flower_app") / "template"
    contents |= {f"{PACKAGE}/{name}": (template / f"{name}.txt").read_text("utf-8") for name in FILES}
    for name, text in contents.items():
        write_file(folder / name, text.encode())
    return [folder / name for name in contents]
