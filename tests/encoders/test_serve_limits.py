"""A hostile client of the encoder server."""

import json
import socket
import threading
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import numpy as np

from fedvlm.encoders import serve
from fedvlm.encoders.serve import MAX_DECODES, create_app, limit_connections
from tests.helpers.live_server import Fake, image, running


@contextmanager
def knock(url, words=b"GET /info HTT"):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(words)
        yield connection


def closed(connection):
    """Whether the server hangs up, as it is waited for."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_open_connections_make_room_for_who_asks():
    served = running(create_app(Fake(), None), http=limit_connections(max_connections=8))
    with served as url, ExitStack() as stack:
        silent = [stack.enter_context(knock(url)) for _ in range(40)]
        assert httpx.get(f"{url}/info", timeout=20).status_code == 200
        assert closed(silent[0])  # the longest wait goes first


def test_header_that_never_ends_is_hung_up_on():
    with running(create_app(Fake(), None), http=limit_connections(header_seconds=0.2)) as url:
        for words in (b"GET /info HTT", b""):
            with knock(url, words) as connection:
                assert closed(connection)
        with knock(url, b"GET /info HTTP/1.1\r\nHost: a\r\n\r\n") as second:
            assert second.recv(65536).startswith(b"HTTP/1.1 200")
            second.sendall(b"GET /in")  # the second request of a connection may not drip either
            assert closed(second)


def test_request_at_work_is_not_hung_up_on():
    def slow(batch, call):
        time.sleep(0.6)
        return np.ones((len(batch), 3), np.float32)

    with running(create_app(Fake(slow), None), http=limit_connections(header_seconds=0.1)) as url:
        body = {"images": [b64encode(b"x").decode()]}
        assert httpx.post(f"{url}/embed", json=body, timeout=20).status_code == 200


def test_body_that_drips_is_refused(monkeypatch):
    monkeypatch.setattr(serve, "BODY_SECONDS", 0.2)
    with running(create_app(Fake(), None)) as url:
        head = b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
        with knock(url, head) as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")


class Watching(Fake):
    """Counts how many images are being decoded at once."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.lock = 0, 0, threading.Lock()

    def preprocess(self, image):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.05)
        with self.lock:
            self.now -= 1
        return np.asarray(image)


def test_few_images_are_decoded_at_once_however_many_ask():
    encoder, callers = Watching(), 8
    body = json.dumps({"images": [b64encode(image()).decode()] * 2})
    with running(create_app(encoder, None)) as url, ThreadPoolExecutor(callers) as pool:
        requests = [pool.submit(httpx.post, f"{url}/embed", content=body, timeout=60) for _ in range(callers)]
        assert {request.result().status_code for request in requests} == {200}
    assert encoder.most <= MAX_DECODES
