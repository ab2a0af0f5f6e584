"""A webhook tells an operator of a few events; it holds no secret, and its failure costs nothing."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from threading import enumerate as threads
from time import monotonic

import pytest

from fedvlm.deploy.kits import create_kits, read_server, read_site
from fedvlm.deploy.operations import webhook
from fedvlm.deploy.operations.events import EventLog
from fedvlm.errors import SettingsError


@contextmanager
def receiver(statuses=()):
    """Yield the address and the messages of a server that answers with these statuses, then with 200."""
    messages, left = [], list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            messages.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(left.pop(0) if left else 200)
            self.end_headers()

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hooks/s3cret", messages
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def kits(tmp_path, monkeypatch):
    monkeypatch.setattr(webhook, "RETRY_SECONDS", 0.01)
    create_kits(tmp_path / "fed", ["north"], "127.0.0.1", 8443)
    return tmp_path / "fed"


def use(folder, address):
    path = folder / ("server.toml" if (folder / "server.toml").exists() else "site.toml")
    path.write_text(path.read_text() + f'webhook = "{address}"\n')
    return EventLog(folder)


def wait():
    for thread in threads():
        if getattr(thread, "_target", None) is webhook.send_message:
            thread.join(10)


def test_the_three_events_reach_the_address(kits):
    with receiver() as (address, messages):
        log = use(kits / "server", address)
        log("begun", method="fedot", training="all", rounds=3, sites=["north"], record="/secret/path")
        log("missing", round=1, site="north", why="Traceback: /home/dr/key")
        log("missing", round=2, site="north", why="again")
        log("round", round=3, there=["north"])
        log("missing", round=4, site="north", why="it left again")
        log("ended", record="/secret/path")
        use(kits / "site-north", address)("asks", method="fedot", rounds=3, leaves=["head [2, 8]"], after=24.4)
        wait()
    names = [message["event"] for message in messages]
    assert sorted(names) == ["consent asked", "run finished", "site late", "site late"]
    late = sorted(message["round"] for message in messages if message["event"] == "site late")
    assert late == [1, 4]
    text = json.dumps(messages)
    assert all(word not in text for word in ("secret", "Traceback", "24.4", "head"))
    [asked] = [message for message in messages if message["event"] == "consent asked"]
    assert asked["from"] == "site north" and "fedot" in asked["text"]


def test_a_failed_message_is_sent_again(kits):
    with receiver([500, 502]) as (address, messages):
        use(kits / "server", address)("ended", record="x")
        wait()
    assert len(messages) == 3


def test_a_webhook_that_fails_delays_nothing_and_is_named_without_its_secret(kits, capfd):
    with receiver([500] * 9) as (address, messages):
        log = use(kits / "server", address)
        begun = monotonic()
        log("ended", record="x")
        assert monotonic() - begun < 1
        wait()
    assert len(messages) == webhook.TRIES
    told = capfd.readouterr().err
    assert "127.0.0.1" in told and "HTTP 500" in told and "s3cret" not in told


def test_an_address_where_nobody_is_costs_nothing(kits, capfd):
    use(kits / "server", "http://127.0.0.1:9/hooks/s3cret")("ended", record="x")
    wait()
    assert "ConnectError" in capfd.readouterr().err


@pytest.mark.parametrize("address", ["ftp://x/y", "chat.example", "https://"])
def test_a_wrong_address_is_refused_by_the_kit(kits, address):
    for folder, read in ((kits / "server", read_server), (kits / "site-north", read_site)):
        use(folder, address)("ended", record="x")  # an invalid setting does not stop a run
        with pytest.raises(SettingsError, match="webhook must be an address"):
            read(folder)
