"""A black box that would fill the memory of who asks it, or never finish."""

import gzip
import json
import socket
import threading
import time
import tracemalloc
from contextlib import contextmanager

import pytest

from fedvlm.encoders import http
from fedvlm.encoders.http import Http
from fedvlm.encoders.serve import create_app
from fedvlm.errors import EncoderError
from tests.helpers.live_server import QUICK, Fake, running


def answering(body, path="/embed", headers=()):
    """The application of a sound server, but for what it answers at one path."""
    inner = create_app(Fake(), None)

    async def served(scope, receive, send):
        if scope["type"] != "http" or scope["path"] != path:
            return await inner(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        for part in body:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return served


def test_packed_answers_are_refused_unopened():
    bomb = gzip.compress(json.dumps({"pooled": "a" * (32 << 20)}).encode(), 1)
    coded = [(b"content-encoding", b"gzip"), (b"content-length", str(len(bomb)).encode())]
    with running(answering([bomb], headers=coded)) as url:
        remote = Http(url, **QUICK)
        tracemalloc.start()
        try:
            with pytest.raises(EncoderError, match="gzip"):
                remote.embed([b"x"], patches=False)
            assert tracemalloc.get_traced_memory()[1] < 20 << 20
        finally:
            tracemalloc.stop()


def test_answers_longer_than_any_sound_one_are_cut_off():
    endless, refused = [b" " * 60_000] * 2000, pytest.raises(EncoderError, match="more than")
    with running(answering(endless)) as url, refused:
        Http(url, **QUICK).embed([b"x"], patches=False)
    refused = pytest.raises(EncoderError, match="more than")
    with running(answering(endless, path="/info")) as url, refused:
        Http(url, **QUICK)


def test_dimensions_nobody_has_are_refused():
    info = {"dim": 1 << 40, "scale": 1.0, "offers": ["image"], "max_batch": 1, "max_bytes": 9999}
    reply = json.dumps(info | {"fingerprint": "a"}).encode()
    with running(answering([reply], path="/info")) as url, pytest.raises(EncoderError, match="dim"):
        Http(url, **QUICK)


@contextmanager
def dripping(first):
    """A server that says the first words, then one more byte every while, and never ends."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)

        def speak():
            while not over.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    try:
                        connection.sendall(first)
                        while not over.wait(0.02):
                            connection.sendall(b"a")
                    except OSError:
                        continue

        thread = threading.Thread(target=speak)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            thread.join(10)


HEADER = b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"


@pytest.mark.parametrize("first", [HEADER, b"HTTP/1.1 200 OK\r\nX-Long: "])
def test_answer_that_drips_is_given_up_after_a_while(first, monkeypatch):
    monkeypatch.setattr(Http, "max_seconds", 0.5)
    began = time.monotonic()
    with dripping(first) as url, pytest.raises(EncoderError, match="took longer than 0.5 seconds"):
        Http(url, **QUICK)
    assert time.monotonic() - began < 20  # without the limit it would take an hour


def test_most_of_an_answer_follows_from_what_was_asked():
    assert http.max_reply_bytes(rows=0, dim=0, patches=False) < 1 << 20
    assert http.max_reply_bytes(rows=256, dim=768, patches=False) < 4 << 20
    assert http.max_reply_bytes(rows=256, dim=1024, patches=True) <= 1 << 30
