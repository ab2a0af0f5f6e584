"""Between a site, its ClientApp and its SuperNode: nothing that comes in ends the site."""

import asyncio
import socket
import struct
from importlib import import_module
from types import SimpleNamespace

import httpx
import pytest

from fedvlm.deploy.flower import site as flower_site
from fedvlm.deploy.flower.access import SECRET_FILE, TOKEN_FOLDER_VARIABLE, TOKEN_HEADER, auth_token, new_secret
from fedvlm.deploy.flower.site import with_access_control
from fedvlm.deploy.site.service import answer_request
from fedvlm.engines.flower import import_flower
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.flower.messages import Message, to_bytes, to_records
from fedvlm.errors import FederationError

SIZE = struct.Struct(">Q")


class Echo:
    def __init__(self, print_line):
        self.log_text = print_line

    def answer(self, request, state):
        if "raise" in request.header:
            raise KeyError(request.header["raise"])
        return request, state


def exchange(data):
    """What a site sends back to these bytes, and what it says about them."""
    printed = []
    site_end, server_end = socket.socketpair()
    with site_end, server_end:
        site_end.sendall(data)
        site_end.shutdown(socket.SHUT_WR)
        answer_request(Echo(printed.append), server_end)
        server_end.close()
        return site_end.recv(1 << 20), printed


def encoded_message(**about):
    data = to_bytes(Message(about))
    return SIZE.pack(len(data)) + data


GARBAGE = {
    "nothing": b"",
    "no size": b"\0\0\0",
    "more than comes": SIZE.pack(1 << 62) + b"x",
    "no header": SIZE.pack(4) + b"abcd",
    "no json": SIZE.pack(20) + struct.pack("<Q", 12) + b"{not a json}",
    "deep json": SIZE.pack(100_008) + struct.pack("<Q", 100_000) + b"[" * 100_000,
    "no words": SIZE.pack(10) + struct.pack("<Q", 2) + b"{}",
    "one of two": encoded_message(kind="round"),
    "an error inside": encoded_message(**{"raise": "x"}) + encoded_message(),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_a_message_that_cannot_be_answered_is_dropped(data):
    back, printed = exchange(data)
    assert back == b"" and len(printed) == 1 and printed[0].startswith("a request was not answered")


def test_a_message_that_can_be_answered_is():
    back, printed = exchange(encoded_message(kind="round") + encoded_message())
    assert back == encoded_message(kind="round") + encoded_message() and printed == []


def test_the_server_learns_nothing_from_an_error_of_the_client_app(monkeypatch):
    app = import_flower()

    def fail(request, state):
        raise OSError("/home/somebody/patients.csv")

    monkeypatch.setattr(flower_site, "query_site", fail)
    grid = local_grid({})
    message = grid.create_message(to_records(Message({"kind": "round"})), "train", 1, "0")
    context = app.Context(1, 1, {}, app.RecordDict(), {})
    with pytest.raises(Exception, match=r"^the site did not reply; see the site's log$"):
        flower_site.create_client_app()(message, context)


def test_a_supernode_answers_its_own_kin_only(tmp_path, monkeypatch):
    """Other users of a site's machine reach its port, too."""
    import_flower()
    from flwr.supernode.main import create_app

    (tmp_path / SECRET_FILE).write_bytes(new_secret())
    monkeypatch.setenv(TOKEN_FOLDER_VARIABLE, str(tmp_path))
    app = with_access_control(create_app)()

    async def call_supernode(**headers):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("127.0.0.1", 9))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            paths = ("/v1/runtime/acquire-task", "/openapi.json", "/health")
            return [(await client.post(path, headers=headers)).status_code for path in paths]

    assert asyncio.run(call_supernode()) == [403, 403, 403]
    assert asyncio.run(call_supernode(**{TOKEN_HEADER: auth_token(tmp_path)})) == [415, 403, 403]  # it is no protobuf


class Runtime:
    """A SuperNode as a task sees it: one message, with an app that nobody should look at."""

    def __init__(self, message, context, broken=()):
        self.message, self.context, self.broken = message, context, broken
        self.replies, self.outputs, self.beats = [], [], 0

    def pull_task_input(self, client):
        if "pull" in self.broken:
            raise ConnectionError
        return self.message, self.context, object(), object()

    def push_message(self, client, reply, context):
        if "push" in self.broken:
            raise ConnectionError
        self.replies.append(reply)

    def push_task_output(self, client, context, status, details):
        self.outputs.append(status)


def a_task(monkeypatch, app, broken=()):
    """What a site's process makes of one task."""
    lib = import_flower()
    message = local_grid({}).create_message(to_records(Message({"kind": "round"})), "train", 1, "0")
    runtime = Runtime(message, lib.Context(1, 1, {}, lib.RecordDict(), {}), broken)
    module = import_module("flwr.supernode.runtime.run_clientapp")
    for name in ("pull_task_input", "push_message", "push_task_output"):
        monkeypatch.setattr(module, name, getattr(runtime, name))
    beat = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr("flwr.supercore.heartbeat.HeartbeatSender", lambda call: beat)
    return runtime, lambda: flower_site.run_task(None, app)


def test_a_task_is_answered_in_the_process_that_took_it(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *words, **options: pytest.fail("a process"))
    runtime, go = a_task(monkeypatch, lambda message, context: "an answer")
    go()
    assert runtime.replies == ["an answer"] and runtime.outputs == ["completed"]


def test_an_error_of_the_app_is_an_answer_and_the_next_task_is_taken(monkeypatch):
    def fail(message, context):
        raise FederationError("the site did not answer")

    runtime, go = a_task(monkeypatch, fail)
    go()
    [reply] = runtime.replies
    assert "the site did not answer" in reply.error.reason and runtime.outputs == ["completed"]


@pytest.mark.parametrize("broken", ["pull", "push"])
def test_a_supernode_that_breaks_off_is_told_that_the_task_has_ended(monkeypatch, broken):
    runtime, go = a_task(monkeypatch, lambda message, context: "an answer", [broken])
    with pytest.raises(ConnectionError):
        go()
    assert runtime.replies == [] and len(runtime.outputs) == 1
