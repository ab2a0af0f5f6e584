"""A connection that breaks, a server in trouble or a message that cannot be read costs a site one request at most."""

import socket
from threading import Event, Thread
from types import SimpleNamespace

import httpx
import pytest

from fedvlm.deploy.flower import fleet
from fedvlm.deploy.flower.fleet import (
    ANSWER_FAILED,
    CallRefused,
    FleetClient,
    NotAdmitted,
    Stopped,
    make_reply,
    serve_requests,
)
from fedvlm.deploy.flower.network import Unreachable, check_server
from fedvlm.deploy.flower.server import create_run, create_superlink, database_grid
from fedvlm.deploy.kits import create_kits
from fedvlm.engines.flower import import_flower
from fedvlm.engines.flower import messages as flower_messages
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.flower.messages import Message, from_records, to_records
from fedvlm.errors import FederationError

import_flower()
from flwr.common.serde import message_to_proto  # noqa: E402
from flwr.proto import fleet_pb2, message_pb2  # noqa: E402


def test_a_proxy_whose_server_is_down_is_waited_for(tmp_path):
    """It takes the connection and ends it; another program would have answered something."""
    _, kit = create_kits(tmp_path / "kits", ["art"], "127.0.0.1", 8443)
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def end():
            stream, _ = proxy.accept()
            with stream:
                stream.recv(1 << 16)  # else it is reset, which is another error

        taking = Thread(target=end)
        taking.start()
        with pytest.raises(Unreachable, match="closes the connection before it is established"):
            check_server(f"127.0.0.1:{proxy.getsockname()[1]}", kit / "ca.crt")
        taking.join(60)


class Waits(Event):
    """A stop that nobody asks for, whose naps take no time."""

    def __init__(self):
        super().__init__()
        self.naps = []

    def wait(self, timeout=None):
        self.naps.append(timeout)
        return self.is_set()


@pytest.fixture
def kit(tmp_path):
    return create_kits(tmp_path / "kits", ["art"], "127.0.0.1", 8443)[1]


def client_of(kit, answer):
    """A site's client whose server is this function of a request."""
    client = FleetClient("server:8443", kit, Waits())
    client.http = httpx.Client(transport=httpx.MockTransport(answer))
    client.node = {"node_id": 7}
    return client


REQUEST = fleet_pb2.PullMessagesRequest()


@pytest.mark.parametrize(
    "problem",
    [
        httpx.ReadError("[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] decryption failed"),
        httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred"),
        httpx.CloseError("closed"),
        500,
        503,
    ],
    ids=str,
)
def test_a_site_tries_again_what_may_pass(kit, problem):
    problems, times = [problem] * 9, set()

    def answer(request):
        times.add(request.headers["flwr-timestamp"])
        if not problems:
            return httpx.Response(200, content=b"a message")
        if isinstance(found := problems.pop(), Exception):
            raise found
        return httpx.Response(found)

    client = client_of(kit, answer)
    assert client.call("pull-messages", REQUEST) == b"a message"
    assert len(client.stop.naps) == 9 and max(client.stop.naps) <= fleet.MAX_RETRY_SECONDS
    assert len(times) == 10  # a signature that has grown old would be refused


@pytest.mark.parametrize(
    ("problem", "error"),
    [
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"), FederationError),
        (401, NotAdmitted),
        (403, CallRefused),
        (412, CallRefused),
    ],
    ids=str,
)
def test_a_site_does_not_try_again_what_only_a_person_can_mend(kit, problem, error):
    calls = []

    def answer(request):
        calls.append(request)
        if isinstance(problem, Exception):
            raise problem
        return httpx.Response(problem)

    with pytest.raises(error):
        client_of(kit, answer).call("pull-messages", REQUEST)
    assert len(calls) == 1


def test_a_site_that_is_stopped_does_not_go_on_trying(kit):
    client = client_of(kit, lambda request: httpx.Response(503))
    client.stop.set()
    with pytest.raises(Stopped):
        client.call("pull-messages", REQUEST)


def test_a_heartbeat_that_fails_is_not_the_last(kit):
    beats = []

    def answer(request):
        beats.append(request.url.path)
        if len(beats) == 3:
            client.stop.set()
        return httpx.Response([500, 401, 200][len(beats) - 1])

    client = client_of(kit, answer)
    client._send_heartbeats()
    assert beats == ["/v1/fleet/send-node-heartbeat"] * 3


def test_the_connection_of_a_killed_process_is_closed_first(kit):
    (kit / ".node").write_text("17")
    calls = []

    def answer(request):
        calls.append(request.url.path.rpartition("/")[2])
        if calls[-1] == "deactivate-node":
            assert fleet_pb2.DeactivateNodeRequest.FromString(request.content).node_id == 17
            return httpx.Response(401)  # of another server
        return httpx.Response(200, content=fleet_pb2.ActivateNodeResponse(node_id=18).SerializeToString())

    client = client_of(kit, answer)
    client.stop.set()  # no heartbeats
    client.connect()
    assert calls == ["deactivate-node", "activate-node"] and (kit / ".node").read_text() == "18"


class Server:
    """A SuperLink's database and fleet routes in this process, for a site of node 7."""

    def __init__(self, folder):
        self.state = create_superlink(folder).state.linkstate_factory.state()
        self.node = self.state.create_node("x", "x", b"key", 30.0)
        self.state.activate_node(self.node, 30.0)
        self.run, self.task = create_run(self.state)
        self.announced = []
        self.grid = database_grid(self.state, self.run, self.task, lambda: self.announced.append(1))
        self.refused = {}  # statuses by route

    def answer(self, request):
        from flwr.superlink.servicer.fleet import fleet_handlers as handlers

        route = request.url.path.rpartition("/")[2]
        if route in self.refused:
            return httpx.Response(self.refused[route])
        kinds = {
            "pull-messages": (fleet_pb2.PullMessagesRequest, handlers.pull_messages, True),
            "push-messages": (fleet_pb2.PushMessagesRequest, handlers.push_messages, False),
            "pull-object": (message_pb2.PullObjectRequest, handlers.pull_object, False),
            "push-object": (message_pb2.PushObjectRequest, handlers.push_object, False),
            "confirm-message-received": (
                message_pb2.ConfirmMessageReceivedRequest,
                handlers.confirm_message_received,
                True,
            ),
        }
        kind, handle, needs_store = kinds[route]
        store = {"store": self.state.object_store} if needs_store else {}
        reply = handle(request=kind.FromString(request.content), state=self.state, **store)
        return httpx.Response(200, content=reply.SerializeToString())

    def ask(self, *headers):
        messages = [
            self.grid.create_message(to_records(Message(header)), "train", self.node, "0") for header in headers
        ]
        return self.grid.push_messages(messages)

    def client(self, kit):
        client = client_of(kit, self.answer)
        client.node = {"node_id": self.node}
        return client


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path)


def replies(server, ids):
    return [from_records(reply.content, "x").header for reply in server.grid.pull_messages(ids)]


def serve(client, answer, count):
    """Serve a number of requests, and return what the site logs."""
    printed, seen = [], []

    def counted(request, state):
        seen.append(request)
        if len(seen) == count:
            client.stop.set()
        return answer(request, state)

    serve_requests(client, counted, printed.append)
    return printed


def test_a_request_is_answered_with_the_state_of_its_run(server, kit):
    ids = server.ask({"kind": "round", "number": 1}, {"kind": "round", "number": 2})
    assert len(server.announced) == 1

    def answer(request, state):
        return Message({**request.header, "before": state.header.get("count", 0)}), Message(
            {"count": state.header.get("count", 0) + 1}
        )

    assert serve(server.client(kit), answer, 2) == []
    assert sorted(header["before"] for header in replies(server, ids)) == [0, 1]


def test_the_server_learns_nothing_from_an_error_of_the_site(server, kit):
    ids = server.ask({"kind": "round"})

    def fail(request, state):
        raise OSError("/home/somebody/patients.csv")

    [line] = serve(server.client(kit), fail, 1)
    assert "patients.csv" in line  # at the site
    [reply] = server.grid.pull_messages(ids)
    assert reply.has_error() and reply.error.reason == ANSWER_FAILED


@pytest.mark.parametrize("route", ["pull-object", "confirm-message-received", "push-messages", "push-object"])
def test_a_run_that_ends_half_way_costs_the_site_one_request(server, kit, route):
    """Whatever is refused of a run that has ended, the site goes on to the next request."""
    server.ask({"kind": "round", "number": 1})
    server.refused[route] = 403
    client, printed = server.client(kit), []

    def log(text):
        printed.append(text)
        server.refused.clear()
        server.ask({"kind": "round", "number": 2})

    def answer(request, state):
        if request.header["number"] == 2:
            client.stop.set()
        return request, state

    serve_requests(client, answer, log)
    assert len(printed) == 1 and "a request was not answered" in printed[0] and "403" in printed[0]


def test_a_site_that_the_server_no_longer_knows_connects_again_or_says_why(server, kit):
    client = server.client(kit)
    server.refused["pull-messages"] = 401
    connected = []

    def connect():
        connected.append(1)
        if len(connected) == 2:
            raise NotAdmitted("activate-node: HTTP status 401")

    client.connect = connect
    with pytest.raises(NotAdmitted):
        serve_requests(client, lambda request, state: (request, state), lambda text: None)
    assert len(connected) == 2


@pytest.mark.parametrize("content", [b"\xff", b"\x0a\x02\xff\xff"])
def test_an_answer_that_is_no_message_does_not_end_the_site(kit, content):
    printed = []

    def log(text):
        printed.append(text)
        client.stop.set()

    client = client_of(kit, lambda request: httpx.Response(200, content=content))
    serve_requests(client, lambda request, state: (request, state), log)
    assert printed[0].startswith("a request was not answered")


def test_half_a_reply_is_waited_for_and_costs_no_other_reply(server, kit):
    """Its site was killed as it sent it; the others answer meanwhile."""
    ids = server.ask({"kind": "round", "number": 1}, {"kind": "round", "number": 2})
    client = server.client(kit)
    first, second = client.receive(), client.receive()
    server.refused["push-object"] = 403
    app = import_flower()
    with pytest.raises(CallRefused):
        client.send(app.Message(first.content, reply_to=first))
    server.refused.clear()
    client.send(app.Message(second.content, reply_to=second))
    number = from_records(second.content, "x").header["number"]
    assert [header["number"] for header in replies(server, ids)] == [number]
    assert replies(server, {*ids} - {second.metadata.message_id}) == []


def test_a_site_cannot_answer_in_the_place_of_another(server, kit):
    """What counts is whose request the server has, not what the site says in its message."""
    ids = server.ask({"kind": "round"})
    client = server.client(kit)
    request = client.receive()
    forged = import_flower().Message(request.content, reply_to=request)
    forged.metadata.__dict__["_reply_to_message_id"] = "0" * 64
    parts, tree = fleet.deflate_message(forged)
    header = message_to_proto(import_flower().Message(import_flower().RecordDict(), reply_to=request))
    header.metadata.message_id = tree.object_id
    push = fleet_pb2.PushMessagesRequest(node=client.node, messages_list=[header], message_object_trees=[tree])
    pushed = fleet_pb2.PushMessagesResponse.FromString(client.call("push-messages", push))
    assert pushed.objects_to_push
    for id in pushed.objects_to_push:
        words = {"node": client.node, "run_id": server.run, "session_id": pushed.session_id, "object_id": id}
        client.call("push-object", message_pb2.PushObjectRequest(object_content=parts[id], **words))
    [arrived] = server.grid.pull_messages(ids)
    assert arrived.has_content() and arrived.metadata.reply_to_message_id == request.metadata.message_id


def test_states_of_old_runs_are_forgotten(kit):
    grid = local_grid({})
    contexts = {}
    for run in range(fleet.MAX_CONTEXTS + 3):
        message = grid.create_message(to_records(Message({"kind": "round"})), "train", 1, "0")
        message.metadata.__dict__["_run_id"] = run
        make_reply(message, contexts, lambda request, state: (request, state), lambda text: None)
    assert len(contexts) == fleet.MAX_CONTEXTS and run in contexts


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on by naps alone."""
    now = [0.0]
    monkeypatch.setattr(flower_messages, "monotonic", lambda: now[0])
    monkeypatch.setattr(flower_messages, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_replies_are_waited_for_until_the_deadline(clock):
    class Grid:
        def pull_messages(self, ids):
            return [SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id="whole"))] if "whole" in ids else []

    reply_ids = [
        reply.metadata.reply_to_message_id for reply in flower_messages.collect_replies(Grid(), ["half", "whole"], 60)
    ]
    assert reply_ids == ["whole"] and 60 <= clock[0] < 61
