"""A running SuperLink of ours, and somebody who reaches its port."""

import ssl
from hashlib import sha256

import httpx
import pytest

from fedvlm.deploy.flower.access import SITE_PATHS
from fedvlm.deploy.flower.processes import free_port, start_superlink
from fedvlm.deploy.kits import create_kits, read_server
from fedvlm.deploy.server.launch import run_states, running_processes
from fedvlm.engines.flower import import_flower

import_flower()
from fastapi.routing import iter_route_contexts  # noqa: E402
from flwr.cli.build import build_fab_from_disk  # noqa: E402
from flwr.proto.control_pb2 import StartRunRequest  # noqa: E402
from flwr.proto.fab_pb2 import Fab  # noqa: E402
from flwr.superlink.main import create_app  # noqa: E402

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern"),  # Flower's own, when it packs an app
]
FLOWER_APP = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "theft"
version = "1.0.0"
description = "a theft"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "thief"
[tool.flwr.app.components]
serverapp = "theft.server:app"
clientapp = "theft.client:app"
""",
    "theft/__init__.py": "",
    "theft/client.py": "app = None\n",
}
THEFT = """\
from pathlib import Path
Path({copy!r}).write_bytes(Path({key!r}).read_bytes())
from flwr.serverapp import ServerApp
app = ServerApp()
app.main()(lambda grid, context: None)
"""


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    place = tmp_path_factory.mktemp("outsiders")
    create_kits(place, ["a"], "127.0.0.1", free_port())
    kit = read_server(place / "server")
    with running_processes() as running:
        running.append(start_superlink(kit))
        yield kit


def call(kit, method, path, content=b"", **headers):
    kinds = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    context = ssl.create_default_context(cafile=str(kit.folder / "ca.crt"))
    with httpx.Client(verify=context, headers={**kinds, **headers}, timeout=60) as client:
        return client.request(method, f"https://{kit.address}{path}", content=content)


def theft(kit, tmp_path):
    """A run whose ServerApp copies the server's signing key as soon as it is imported."""
    app = tmp_path / "app"
    for name, text in FLOWER_APP.items():
        path = app / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = {"copy": str(tmp_path / "copy"), "key": str(kit.folder / "signing.key")}
    (app / "theft" / "server.py").write_text(THEFT.format(**words))
    content = build_fab_from_disk(app)
    fab = Fab(hash_str=sha256(content).hexdigest(), content=content)
    return StartRunRequest(fab=fab).SerializeToString(), tmp_path / "copy"


def test_an_outsiders_run_is_refused_and_nothing_runs(kit, tmp_path):
    content, copy = theft(kit, tmp_path)
    assert call(kit, "POST", "/v1/control/start-run", content).status_code == 403
    assert run_states(kit) == {} and not copy.exists()


def test_no_route_of_the_running_superlink_answers_an_outsider(kit):
    route_list = [
        (method, route.path)
        for route in iter_route_contexts(create_app().routes)
        for method in getattr(route, "methods", None) or {"GET"}
    ]
    answers = {route: call(kit, *route).status_code for route in route_list}
    assert len(answers) > 80
    assert {path for (_, path), status in answers.items() if status == 401} == SITE_PATHS
    assert set(answers.values()) == {401, 403}
