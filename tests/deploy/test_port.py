"""Strangers at the server's port: what they can take before a call of theirs is parsed."""

import socket
import ssl
import threading
from contextlib import contextmanager, suppress
from time import monotonic, sleep

import numpy as np
import pytest

from fedvlm.deploy.flower import port
from fedvlm.deploy.flower.access import AccessMiddleware, NewMessages
from fedvlm.deploy.identity.keys import create_certificates
from fedvlm.engines.flower.messages import MAX_ARRAYS, Message, from_bytes, to_bytes

PATH = "/v1/fleet/push-messages"
ALLOWED = f"GET {PATH} HTTP/1.1\r\nHost: x\r\nsigned: yes\r\n\r\n".encode()


async def hello(scope, receive, send):
    while scope["type"] == "http" and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


class Served:
    """A server within the bounds on a free port of this machine, with TLS, and its callers."""

    def __init__(self, folder, create=port.create_server):
        for name, content in create_certificates("127.0.0.1").items():
            (folder / name).write_bytes(content)
        self.context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        certificate = {"ssl_certfile": folder / "server.pem", "ssl_keyfile": folder / "server.key"}
        app = AccessMiddleware(hello, lambda scope: (b"signed", b"yes") in scope["headers"], NewMessages())
        self.server, self.listener = create(app, "127.0.0.1", 0, lifespan="off", log_config=None, **certificate)
        self.address = self.listener.getsockname()
        self.thread = threading.Thread(target=lambda: self.server.run([self.listener]))

    def connect(self, source="127.0.0.1", seconds=10.0):
        plain = socket.create_connection(self.address, seconds, source_address=(source, 0))
        return self.context.wrap_socket(plain, server_hostname="127.0.0.1")

    def answer(self, data, **options):
        with self.connect(**options) as caller:
            caller.sendall(data)
            return caller.recv(1000)


@contextmanager
def served(folder, **options):
    port.CONNECTIONS.__init__()
    server = Served(folder, **options)
    server.thread.start()
    try:
        while not server.server.started:
            assert server.thread.is_alive()
            sleep(0.01)
        yield server
    finally:
        server.server.should_exit = True
        server.thread.join(20)
        server.listener.close()


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(port, "HEADER_SECONDS", 1.0)
    monkeypatch.setattr(port, "BODY_SECONDS", 1.0)
    monkeypatch.setattr(port, "MAX_PENDING_PER_ADDRESS", 4)
    monkeypatch.setattr(port, "MAX_CONNECTIONS", 8)
    with served(tmp_path) as server:
        yield server


def is_open(caller):
    """Whether the server still waits for this caller."""
    caller.settimeout(0.05)
    try:
        return caller.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def seconds_open(caller, send=lambda: None, most=6.0):
    start = monotonic()
    with suppress(OSError):
        while monotonic() - start < most and is_open(caller):
            send()
    return monotonic() - start


def test_an_allowed_call_is_answered_again_and_again(server):
    with server.connect() as caller:
        for _ in range(3):
            caller.sendall(ALLOWED)
            assert caller.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_header_that_never_ends_is_cut_off(server):
    with server.connect() as caller:
        caller.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nh: ")
        sent = 0
        with suppress(OSError):
            while sent < 50 << 20:
                caller.sendall(b"a" * (1 << 20))
                sent += 1 << 20
    assert sent < 50 << 20
    assert server.answer(b"GET / HTTP/1.1\r\nX: " + b"a" * (16 << 10)).startswith(b"HTTP/1.1 431")
    assert server.answer(ALLOWED).startswith(b"HTTP/1.1 200")


def test_many_headers_and_a_long_path_are_cut_off(server):
    many = b"".join(b"h%d: 1\r\n" % place for place in range(5000))
    for data in (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + many + b"\r\n"):
        assert server.answer(data).startswith(b"HTTP/1.1 431")


def test_a_header_that_takes_its_time_is_cut_off(server):
    with server.connect() as silent:
        assert 0.5 < seconds_open(silent) < 4
    for start, drip in ((b"GET / HTTP/1.1\r\n", b"h: a\r\n"), (b"", b"\r\n")):
        with server.connect() as slow:
            slow.sendall(start)
            assert 0.5 < seconds_open(slow, lambda drip=drip, slow=slow: slow.sendall(drip)) < 4


def test_a_second_header_has_the_same_bounds(server):
    with server.connect() as caller:
        caller.sendall(ALLOWED)
        assert caller.recv(1000).startswith(b"HTTP/1.1 200")
        caller.sendall(b"GET / HTTP/1.1\r\n")
        assert 0.5 < seconds_open(caller, lambda: caller.sendall(b"h: a\r\n")) < 4


def test_a_body_that_takes_its_time_is_cut_off(server):
    start = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nsigned: yes\r\nContent-Length: 9000\r\n\r\n"
    with server.connect() as slow:
        slow.sendall(start.encode())
        assert 0.5 < seconds_open(slow, lambda: slow.sendall(b"a")) < 5
    with server.connect() as fast:
        fast.sendall(start.encode() + bytes(9000))
        assert fast.recv(1000).startswith(b"HTTP/1.1 200")


def test_calls_that_do_not_wait_for_an_answer_are_refused(server):
    assert b"HTTP/1.1 400" in server.answer(ALLOWED * 3)


def test_one_more_connection_ends_the_oldest_that_has_done_nothing(server):
    with server.connect() as admitted:
        admitted.sendall(ALLOWED)
        assert admitted.recv(1000).startswith(b"HTTP/1.1 200")
        idle = [server.connect() for _ in range(4)]
        assert server.answer(ALLOWED).startswith(b"HTTP/1.1 200")  # of the same address
        sleep(0.2)
        assert [is_open(caller) for caller in idle] == [False, True, True, True]
        admitted.sendall(ALLOWED)
        assert admitted.recv(1000).startswith(b"HTTP/1.1 200")
        for caller in idle:
            caller.close()


def test_many_addresses_leave_room_for_a_call(server):
    idle = [server.connect(f"127.0.0.{place}") for place in range(2, 10)]
    assert server.answer(ALLOWED).startswith(b"HTTP/1.1 200")
    for caller in idle:
        caller.close()


def test_connections_that_never_speak_tls_are_ended(server):
    plain = [socket.create_connection(server.address, 5) for _ in range(12)]
    sleep(0.3)
    assert sum(is_open(caller) for caller in plain) <= 4
    assert server.answer(ALLOWED).startswith(b"HTTP/1.1 200")
    for caller in plain:
        caller.close()


def test_strangers_write_no_line_to_the_log(server, capfd):
    for data in (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", b"nonsense\r\n\r\n", ALLOWED * 2):
        server.answer(data)
    assert capfd.readouterr() == ("", "")


def test_without_the_bounds_a_stranger_keeps_the_server_busy(tmp_path):
    """What the tests above would find: uvicorn alone."""
    import uvicorn

    def plain(app, host, number, **options):
        listener = socket.create_server((host, number))
        return uvicorn.Server(uvicorn.Config(app, host=host, port=number, ws="none", **options)), listener

    with served(tmp_path, create=plain) as server:
        idle = [server.connect() for _ in range(40)]
        idle[0].sendall(b"GET / HTTP/1.1\r\nh: " + b"a" * (1 << 20))
        sleep(1.5)
        assert all(is_open(caller) for caller in idle)
        for caller in idle:
            caller.close()


@pytest.mark.parametrize("count", [MAX_ARRAYS + 1, 300_000])
def test_a_message_of_empty_tensors_is_refused_before_it_is_parsed(count, monkeypatch):
    data = to_bytes(Message({"kind": "round"}, {f"{place:x}": np.zeros(0, np.float32) for place in range(count)}))
    monkeypatch.setattr("safetensors.numpy.load", None)
    monkeypatch.setattr("json.loads", None)
    start = monotonic()
    with pytest.raises(ValueError, match="more than 10000 arrays"):
        from_bytes(data)
    assert monotonic() - start < 1


def test_a_message_of_many_tensors_is_read():
    arrays = {f"{place:x}": np.zeros(1, np.float32) for place in range(3000)}
    assert len(from_bytes(to_bytes(Message({"kind": "round"}, arrays))).arrays) == 3000
