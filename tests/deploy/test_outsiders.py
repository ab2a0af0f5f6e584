"""A running SuperLink of ours, and somebody who reaches its port."""

import ssl
from hashlib import sha256
from time import monotonic, sleep

import httpx
import pytest

from fedvlm.deploy.flower.access import SITE_PATHS, TOKEN_HEADER, auth_token
from fedvlm.deploy.flower.processes import CONNECTION_NAME, free_port, run_flwr, start_superlink
from fedvlm.deploy.kits import create_kits, read_server
from fedvlm.deploy.server.launch import FLOWER_APP, running_processes
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
    (app / "fedvlm_app" / "server.py").write_text(THEFT.format(**words))
    content = build_fab_from_disk(app)
    fab = Fab(hash_str=sha256(content).hexdigest(), content=content)
    return StartRunRequest(fab=fab).SerializeToString(), tmp_path / "copy"


def runs(kit):
    return run_flwr(kit, "list", CONNECTION_NAME)["runs"]


def test_an_outsiders_run_is_refused_and_nothing_runs(kit, tmp_path):
    content, copy = theft(kit, tmp_path)
    assert call(kit, "POST", "/v1/control/start-run", content).status_code == 403
    wrong = {TOKEN_HEADER: "0" * 64}
    assert call(kit, "POST", "/v1/control/start-run", content, **wrong).status_code == 403
    assert runs(kit) == [] and not copy.exists()


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


def test_a_task_is_not_given_without_flowers_own_signature(kit):
    token_header = {TOKEN_HEADER: auth_token(kit.folder)}
    assert call(kit, "POST", "/v1/control/list-runs", **token_header).status_code == 200
    assert call(kit, "POST", "/v1/runtime/acquire-task", **token_header).status_code == 401


def test_code_that_comes_with_a_run_is_not_run_at_the_server(kit, tmp_path):
    """Even whoever can start a run starts fedvlm's ServerApp, for the request in the folder."""
    content, copy = theft(kit, tmp_path)
    token_header = {TOKEN_HEADER: auth_token(kit.folder)}
    assert call(kit, "POST", "/v1/control/start-run", content, **token_header).status_code == 200
    end = monotonic() + 120
    while not (ended := runs(kit)[0]["status"]).startswith("finished"):
        assert monotonic() < end
        sleep(0.5)
    assert "failed" in ended and not copy.exists()  # there is no request in the folder
