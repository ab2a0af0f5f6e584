"""Who gets in at the SuperLink's port, asked of Flower's own app in this process."""

import asyncio
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from threading import Timer
from time import monotonic

import httpx
import pytest
from fastapi.routing import iter_route_contexts

from fedvlm.deploy.flower import access
from fedvlm.deploy.flower.access import PULL_PATH, SITE_PATHS, NewMessages
from fedvlm.deploy.flower.processes import flower_environment
from fedvlm.deploy.flower.server import create_run, create_superlink, guard_superlink
from fedvlm.deploy.identity import certificates
from fedvlm.deploy.identity.certificates import certificate_path, issue_certificate
from fedvlm.deploy.identity.enrolment import (
    NEXT_KEY_FILE,
    accept_certificate,
    admit_site,
    create_join_request,
    read_request,
    revoke_site,
)
from fedvlm.deploy.identity.keys import Signer, create_key_pair
from fedvlm.deploy.kits import INVITATION_FILE, create_kits, read_server
from fedvlm.engines.flower import import_flower

import_flower()
from cryptography.hazmat.primitives.serialization import load_ssh_private_key  # noqa: E402
from flwr.app import ConfigRecord  # noqa: E402
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse, PullMessagesRequest  # noqa: E402
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest  # noqa: E402
from flwr.proto.node_pb2 import Node  # noqa: E402
from flwr.supercore.date import now  # noqa: E402
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message  # noqa: E402
from flwr.superlink.main import create_app  # noqa: E402

KINDS = {"content-type": "application/protobuf", "accept": "application/protobuf"}


@pytest.fixture
def folder(tmp_path):
    create_kits(tmp_path / "kits", ["a", "b"], "127.0.0.1", 8443)
    return tmp_path / "kits" / "server"


@pytest.fixture
def new_messages(monkeypatch):
    monkeypatch.setattr(access, "HOLD_SECONDS", 0.0)
    return NewMessages()


@pytest.fixture
def app(folder, new_messages):
    return guard_superlink(create_superlink(folder), folder, new_messages)


def routes(app):
    """Every method and path that the app answers, with whatever it has been given."""
    route_list = {
        (method, route.path)
        for route in iter_route_contexts(app.routes)
        for method in getattr(route, "methods", None) or {"GET"}
    }
    assert len(route_list) > 80
    return sorted(route_list)


def call(app, path, method="POST", address="127.0.0.1", content=b"", **headers):
    header_list = [(key.replace("_", "-"), header) for key, header in (KINDS | headers).items()]

    async def header():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 9))
        async with httpx.AsyncClient(transport=transport, base_url="https://x") as client:
            return await client.request(method, path, headers=header_list, content=content)

    return asyncio.run(header())


def signed(private):
    """What a SuperNode with this key says in the headers of a call, and its public key."""
    key = load_ssh_private_key(private, None)
    public, time = public_key_to_bytes(key.public_key()), now().isoformat()
    headers = {
        "flwr_public_key": b64encode(public).decode(),
        "flwr_timestamp": time,
        "flwr_signature": b64encode(sign_message(key, time.encode())).decode(),
    }
    return headers, public


def activate(app, private):
    headers, public = signed(private)
    content = ActivateNodeRequest(public_key=public, heartbeat_interval=30).SerializeToString()
    return call(app, "/v1/fleet/activate-node", content=content, **headers)


def key_of(folder, name):
    return (folder.parent / f"site-{name}" / "key").read_bytes()


def test_no_route_is_open_without_a_key(app):
    async def new():
        return "reached"

    for path in ("/v2/new", "/v1/fleet/new", "/v1/control/new", "/v1/runtime/new"):
        app.add_api_route(path, new)
    answers = {route: call(app, route[1], route[0]).status_code for route in routes(app)}
    assert {path for (_, path), status in answers.items() if status == 401} == SITE_PATHS
    assert set(answers.values()) == {401, 403}


def test_without_the_gate_most_routes_are_open():
    """What the test above would find: it can fail."""
    app = create_app()
    open = [route for route in routes(app) if call(app, route[1], route[0]).status_code not in (401, 403)]
    assert ("POST", "/v1/control/start-run") in open
    assert ("POST", "/v1/runtime/acquire-task") in open
    assert ("GET", "/openapi.json") in open


def test_only_keys_of_the_federation_become_nodes(app, folder):
    numbers = set()
    for name in ("a", "b"):
        answer = activate(app, key_of(folder, name))
        assert answer.status_code == 200
        numbers.add(ActivateNodeResponse.FromString(answer.content).node_id)
    assert len(numbers) == 2
    assert activate(app, create_key_pair()[0]).status_code == 401


def test_a_key_is_let_in_and_sent_away_without_a_restart(app, folder):
    private, public = create_key_pair()
    assert activate(app, private).status_code == 401
    issue_certificate(folder, "127.0.0.1:8443", "c", public)
    certificate = certificate_path(folder, "c").read_bytes()
    certificate_path(folder, "c").write_bytes(certificate[:400])
    assert activate(app, private).status_code == 401  # it is only half written
    assert activate(app, key_of(folder, "a")).status_code == 200
    certificate_path(folder, "c").write_bytes(certificate)
    assert activate(app, private).status_code == 200
    certificate_path(folder, "c").unlink()
    assert activate(app, private).status_code == 401
    assert activate(app, key_of(folder, "b")).status_code == 200


def test_a_revoked_site_is_sent_away_at_its_next_call_and_its_node_is_off(app, folder):
    """Whatever it signs, and though it keeps its key and certificate."""
    node = ActivateNodeResponse.FromString(activate(app, key_of(folder, "a")).content).node_id
    state = app.state.linkstate_factory.state()
    assert [node_info.status for node_info in state.get_node_info(node_ids=[node])] == ["online"]
    headers, _ = signed(key_of(folder, "a"))
    revoke_site(read_server(folder), "a")
    for path in sorted(SITE_PATHS):
        assert call(app, path, **headers).status_code == 401
    assert activate(app, key_of(folder, "a")).status_code == 401
    assert [node_info.status for node_info in state.get_node_info(node_ids=[node])] == ["offline"]
    assert activate(app, key_of(folder, "b")).status_code == 200


def test_a_renewed_site_comes_by_its_new_key_only(app, folder):
    site, kit = folder.parent / "site-a", read_server(folder)
    old = key_of(folder, "a")
    assert activate(app, old).status_code == 200
    accept_certificate(site, admit_site(kit, read_request(kit, create_join_request(site).path)))
    assert activate(app, old).status_code == 401
    assert activate(app, key_of(folder, "a")).status_code == 200


def test_a_key_is_not_let_in_after_its_last_day(app, folder, monkeypatch):
    assert activate(app, key_of(folder, "a")).status_code == 200
    after_expiry = datetime.now(UTC) + timedelta(days=366)
    monkeypatch.setattr(certificates, "datetime", Clock(after_expiry))
    assert activate(app, key_of(folder, "a")).status_code == 401


class Clock:
    """The class `datetime` at another time."""

    fromisoformat = datetime.fromisoformat

    def __init__(self, time):
        self.time = time

    def now(self, zone):
        return self.time


def test_a_key_that_this_server_has_not_signed_is_not_let_in(app, folder, tmp_path):
    """Whoever can drop a file into `sites/` needs the server's signing key, too."""
    foreign_server, site = create_kits(tmp_path / "other", ["c"], "127.0.0.1", 8443)
    certificate_path(folder, "c").write_bytes(certificate_path(foreign_server, "c").read_bytes())
    assert activate(app, (site / "key").read_bytes()).status_code == 401
    (folder / "sites" / "c.pub").write_bytes(Signer(site / "key").public)
    assert activate(app, (site / "key").read_bytes()).status_code == 401
    request = create_join_request(tmp_path / "new", folder / INVITATION_FILE, "new")
    assert activate(app, request.path.with_name(NEXT_KEY_FILE).read_bytes()).status_code == 401


def test_a_sites_key_opens_nothing_else(app, folder):
    headers, _ = signed(key_of(folder, "a"))
    closed = [(method, path) for method, path in routes(app) if path not in SITE_PATHS]
    assert closed
    for method, path in closed:
        assert call(app, path, method, **headers).status_code == 403


def test_a_known_public_key_without_its_signature_is_refused(app, folder):
    headers, _ = signed(key_of(folder, "a"))
    theirs, _ = signed(key_of(folder, "b"))
    for wrong in (
        {**headers, "flwr_signature": theirs["flwr_signature"]},
        {**headers, "flwr_timestamp": "2020-01-01T00:00:00+00:00"},
        {**headers, "flwr_signature": "not base64!"},
        {key: header for key, header in headers.items() if key != "flwr_signature"},
        # Of two headers of a name, the gate and Flower could each read another.
        {**headers, "Flwr_Public_Key": theirs["flwr_public_key"]},
    ):
        assert call(app, "/v1/fleet/pull-messages", **wrong).status_code == 401


@pytest.mark.parametrize("host", ["x/v1/runtime/pull-object?", "x#", "x/v1/control/list-runs?"])
def test_a_strange_host_leads_nowhere(app, host):
    """Flower looks at a URL that is put together from the header, routes at the path."""
    assert call(app, "/v1/fleet/pull-object", host=host).status_code == 401


def test_the_body_of_an_outsider_is_not_read(app):
    async def body():
        raise AssertionError("it was read")
        yield b""

    for path in ("/v1/control/start-run", "/v1/fleet/push-object"):
        assert call(app, path, content=body()).status_code in (401, 403)


def test_a_websocket_is_closed(app):
    sent = []

    async def send(message):
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/v1/fleet/pull-messages", "headers": []}
    asyncio.run(app(scope, None, send))
    assert sent == ["websocket.close"]


def test_flower_is_not_told_to_open_more_ports(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_FLEET_API", "1")
    assert not [variable for variable in flower_environment(tmp_path) if variable.startswith("FLWR_INTERNAL")]


def test_what_the_gate_names_is_there(app):
    """A route that Flower renamed would shut every site out."""
    paths = {path for _, path in routes(app)}
    assert paths >= SITE_PATHS


def test_a_site_sends_no_call_that_fills_the_servers_memory(app, folder, monkeypatch):
    """Neither one that says its length, nor one that does not and goes on for ever."""
    monkeypatch.setattr(access, "MAX_OBJECT_BYTES", 1000)
    monkeypatch.setattr(access, "MAX_CALL_BYTES", 500)
    headers, _ = signed(key_of(folder, "a"))
    assert call(app, access.OBJECT_PATH, content=bytes(1001), **headers).status_code == 413
    assert call(app, "/v1/fleet/push-messages", content=bytes(501), **headers).status_code == 413

    async def endless():
        raise AssertionError("it was read")
        yield b""

    assert call(app, access.OBJECT_PATH, content=endless(), **headers).status_code == 411
    assert activate(app, key_of(folder, "a")).status_code == 200


def pull(app, folder, number):
    headers, _ = signed(key_of(folder, "a"))
    content = PullMessagesRequest(node={"node_id": number}).SerializeToString()
    return call(app, PULL_PATH, content=content, **headers)


def test_a_request_for_messages_waits_for_one_and_no_longer(app, folder, new_messages, monkeypatch):
    number = ActivateNodeResponse.FromString(activate(app, key_of(folder, "a")).content).node_id
    monkeypatch.setattr(access, "HOLD_SECONDS", 0.5)
    started = monotonic()
    assert pull(app, folder, number).content == b""
    assert 0.5 <= monotonic() - started < 30
    monkeypatch.setattr(access, "HOLD_SECONDS", 60.0)
    timer = Timer(0.5, new_messages.announce)
    started = monotonic()
    timer.start()
    assert pull(app, folder, number).status_code == 200
    assert 0.4 <= monotonic() - started < 30


def test_a_refused_request_for_messages_does_not_wait(app, folder, monkeypatch):
    monkeypatch.setattr(access, "HOLD_SECONDS", 60.0)
    started = monotonic()
    assert call(app, PULL_PATH).status_code == 401
    assert pull(app, folder, 17).status_code == 401  # a node that is not its own
    assert monotonic() - started < 30


def test_an_object_that_nobody_asked_for_is_refused(app, folder):
    """And one that its message has announced is not."""
    node = ActivateNodeResponse.FromString(activate(app, key_of(folder, "a")).content).node_id
    state = app.state.linkstate_factory.state()
    run, _ = create_run(state)
    content = ConfigRecord({"a": 1}).deflate()
    object_id = sha256(content).hexdigest()

    def push():
        request = PushObjectRequest(node=Node(node_id=node), run_id=run, object_id=object_id, object_content=content)
        headers, _ = signed(key_of(folder, "a"))
        return call(app, access.OBJECT_PATH, content=request.SerializeToString(), **headers).status_code

    assert push() == 404
    session = state.start_session(run)
    state.preregister_object_tree(ObjectTree(object_id=object_id), session)
    assert push() == 200


def test_sites_together_fill_no_more_than_their_part_of_the_memory(folder, monkeypatch):
    """Calls that are being read count; one site has less than all."""
    monkeypatch.setattr(access, "MAX_OBJECT_BYTES", 1000)
    monkeypatch.setattr(access, "MAX_TOTAL_BYTES", 1500)

    async def both():
        release = asyncio.Event()

        async def slow(scope, receive, send):
            await release.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

        keys = access.SiteKeys(folder, lambda scope, key: None)
        middleware = access.AccessMiddleware(slow, keys, NewMessages())

        async def push(name, size):
            statuses = []

            async def send(message):
                statuses.append(message.get("status"))

            words = {"content-length": str(size), **signed(key_of(folder, name))[0]}
            header_list = [(key.replace("_", "-").encode(), word.encode()) for key, word in words.items()]
            await middleware({"type": "http", "path": access.OBJECT_PATH, "headers": header_list}, None, send)
            return statuses[0]

        reading = [asyncio.create_task(push("a", 900))]
        await asyncio.sleep(0)
        assert await push("a", 200) == 503  # its own part is full
        reading.append(asyncio.create_task(push("b", 500)))
        await asyncio.sleep(0)
        assert await push("b", 200) == 503  # all is full
        release.set()
        assert [await task for task in reading] == [200, 200]
        assert await push("b", 1000) == 200  # and free again

    asyncio.run(both())
