"""A connection that breaks, or a server in trouble, costs a site its time and not its place."""

import socket
from importlib import import_module
from threading import Thread
from time import monotonic
from types import SimpleNamespace

import httpx
import pytest

from fedvlm.deploy import flower as deploy_flower
from fedvlm.deploy.flower import server as flower_server
from fedvlm.deploy.flower import site as flower_site
from fedvlm.deploy.flower.processes import Unreachable, check_server
from fedvlm.deploy.kits import create_kits
from fedvlm.engines.flower import import_flower
from fedvlm.engines.flower import messages as flower_messages


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


def retrying(**options):
    import_flower()
    connection = import_module("flwr.supernode.fleet_http_connection")
    again = deploy_flower.make_retrying(connection.make_simple_http_retry_invoker, **options)()
    again.wait_function = short
    return again


def short(seconds):
    """Not much longer than a server takes to start; Flower would nap for 20 seconds."""
    assert seconds <= deploy_flower.MAX_RETRY_SECONDS


def answer(status):
    request = httpx.Request("POST", "https://server/v1/fleet/pull-messages")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status))


@pytest.mark.parametrize(
    "error",
    [
        httpx.ReadError("[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] decryption failed"),
        httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred"),
        httpx.CloseError("closed"),
        answer(500),
        answer(503),
    ],
    ids=lambda failure: f"{type(failure).__name__} {str(failure)[:20]}",
)
def test_a_site_tries_again_what_may_pass(error):
    """Flower's SuperNode ends its work at the first of them, and stays there, deaf."""
    troubles = [error] * 9

    def call():
        if troubles:
            raise troubles.pop()
        return "a message"

    assert retrying().invoke(call) == "a message"


def test_a_site_does_not_try_again_what_only_a_person_can_mend():
    calls = []

    def call(error):
        calls.append(error)
        raise error

    foreign = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    for error in (foreign, answer(412)):
        with pytest.raises(type(error)):
            retrying().invoke(call, error)
    with pytest.raises(httpx.HTTPStatusError):  # of a run, whose error somebody waits for
        retrying(retry_server_errors=False).invoke(call, answer(500))
    assert len(calls) == 3


def test_a_servers_superexec_outlasts_a_flood_of_connections(monkeypatch):
    """Its own server ends the connection inside TLS, as it has none left."""
    import_flower()
    loop = import_module("flwr.supercore.superexec.run_superexec")
    monkeypatch.setattr(loop, "make_simple_http_retry_invoker", loop.make_simple_http_retry_invoker)
    types = loop.AutoExecPlugin.supported_task_types
    monkeypatch.setattr(loop.AutoExecPlugin, "supported_task_types", types)
    monkeypatch.setattr(flower_server, "attach_token", lambda: None)
    monkeypatch.setattr("flwr.supercore.cli.flower_superexec", lambda: None)
    flower_server.run_superexec()
    again = loop.make_simple_http_retry_invoker()
    assert not again.should_giveup(httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF"))


def test_a_heartbeat_that_fails_is_not_the_last():
    import_flower()
    sender = flower_site.retrying_heartbeat(import_module("flwr.supercore.heartbeat").HeartbeatSender)
    troubles = [RuntimeError("not recognised"), answer(500)]

    def beat():
        if troubles:
            raise troubles.pop()
        heartbeat._stop_event.set()  # no more are needed
        return True

    heartbeat = sender(beat)
    heartbeat._retry_invoker.wait_function = lambda seconds: None
    heartbeat._run()
    assert troubles == []


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on by naps alone."""
    now = [0.0]
    monkeypatch.setattr(flower_messages, "monotonic", lambda: now[0])
    monkeypatch.setattr(flower_messages, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_half_a_reply_is_waited_for_until_the_deadline_and_costs_no_other_reply(clock):
    """Its site was killed as it sent it; the others answer meanwhile."""

    class Grid:
        def pull_messages(self, ids):
            id = sorted(ids)[0]
            if id == "half":
                clock[0] = self.until + 0.1  # as long as it is waited for its rest
            return [SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=id))]

    reply_ids = [
        reply.metadata.reply_to_message_id for reply in flower_messages.collect_replies(Grid(), ["half", "whole"], 60)
    ]
    assert reply_ids == ["half", "whole"] and clock[0] < 61


def test_the_rest_of_a_reply_is_not_waited_for_beyond_the_deadline():
    """Flower would for two hours, and every other site with it."""
    import_flower()
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

    over_http = import_module("flwr.superlink.grid.http_grid")
    pending_ids = ["one look"]

    def unavailable(id):
        pending_ids.pop()  # an error, if it is looked for again though time is up
        raise ObjectUnavailableError(id)

    pull = flower_server.limit_pull_time(over_http.pull_objects, SimpleNamespace(until=monotonic() - 1))
    with pytest.raises(ObjectPullError, match="timeout"):
        pull(object_ids=["late"], pull_object_fn=unavailable)
    assert pending_ids == []
    slow = [b"it came", ObjectUnavailableError("slow"), ObjectUnavailableError("slow")]

    def pull_object(id):
        if isinstance(slow[-1], Exception):
            raise slow.pop()
        return slow[0]

    pull = flower_server.limit_pull_time(over_http.pull_objects, SimpleNamespace(until=monotonic() + 60))
    assert pull(object_ids=["slow"], pull_object_fn=pull_object) == {"slow": b"it came"}
