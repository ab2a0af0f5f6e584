import io
import json
import logging
import socket
import subprocess
import threading
import time
from base64 import b64encode
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import tiny_models
import torch
import uvicorn
from PIL import Image

from fedvlm.encoders import fingerprint, open_encoder
from fedvlm.encoders.http import Http
from fedvlm.encoders.huggingface import HuggingFace
from fedvlm.encoders.interface import Vectors
from fedvlm.encoders.serve import app, serve
from fedvlm.errors import EncoderError, SettingsError

QUICK = {"wait": 0.01, "timeout": 5.0}


def picture(seed=0, size=(20, 14)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


class Fake:
    """An encoder whose vectors a test decides."""

    name, dim, scale, preprocess = "fake:/secret/place/model", 3, 50.0, None
    offers = frozenset({"image", "patches", "text tower"})

    def __init__(self, answer=None):
        self.identity = {"weights": "one"}
        self.calls = []
        self.answer = answer or (lambda batch, call: np.ones((len(batch), 3), np.float32))

    def embed(self, batch, patches):
        self.calls.append(len(batch))
        pooled = self.answer(batch, len(self.calls))
        return Vectors(pooled, np.zeros((len(batch), 2, 3), np.float16) if patches else None)

    def embed_text(self, sentences):
        raise AssertionError("not offered")


class Moody:
    """Answers the first requests for a path itself, then lets them through."""

    def __init__(self, inner, path, status, times, headers=()):
        self.inner, self.path, self.status, self.left = inner, path, status, times
        self.headers, self.at = list(headers), []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == self.path:
            self.at.append(time.monotonic())
            if self.left > 0:
                self.left -= 1
                start = {"type": "http.response.start", "status": self.status}
                await send({**start, "headers": self.headers})
                await send({"type": "http.response.body", "body": b"{}"})
                return
        await self.inner(scope, receive, send)


@contextmanager
def running(served, **settings):
    """A real uvicorn server on a free port of this machine."""
    config = uvicorn.Config(served, port=0, log_config=None, ws="none", lifespan="off", **settings)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"{'https' if 'ssl_certfile' in settings else 'http'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return HuggingFace(tiny_models.clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def clip_url(clip):
    with running(app(clip, None)) as url:
        yield url


def test_vectors_over_http_are_those_of_the_encoder_itself(clip, clip_url):
    from fedvlm.encoders.decode import decode

    remote = open_encoder(f"http:{clip_url}")
    files = [picture(seed) for seed in range(5)]
    local = clip.embed([clip.preprocess(decode(file)) for file in files], patches=True)
    answer = remote.embed(files, patches=True)
    assert np.allclose(answer.pooled, local.pooled, atol=1e-6)
    assert answer.patches is not None
    assert np.array_equal(answer.patches, local.patches)
    assert remote.embed(files, patches=False).patches is None
    assert torch.allclose(remote.embed_text(["a cat"]), clip.embed_text(["a cat"]), atol=1e-6)
    assert (remote.dim, remote.scale) == (clip.dim, pytest.approx(clip.scale))
    assert remote.drift is not None
    assert remote.drift < 1e-5


def test_a_server_offers_embeddings_and_never_the_tower(clip, clip_url):
    info = httpx.get(f"{clip_url}/info").json()
    assert info["offers"] == ["image", "patches", "text"]
    assert info["fingerprint"] == fingerprint(clip)
    assert "/" not in info["name"]
    assert open_encoder(clip_url).offers == {"image", "patches", "text"}  # http://... alone
    assert httpx.get(f"{clip_url}/docs").status_code == 404
    assert httpx.get(f"{clip_url}/weights").status_code == 404


def test_batches_are_cut_to_what_the_server_takes():
    fake = Fake()
    with running(app(fake, None, max_bytes=4000, max_batch=4)) as url:
        remote = Http(url, **QUICK)
        assert remote.embed([b"x" * 10] * 9, patches=False).pooled.shape == (9, 3)
        assert fake.calls == [4, 4, 1, 1]  # the last is the probe
        fake.calls.clear()
        remote.embed([b"x" * 1000] * 4, patches=False)
        assert fake.calls == [2, 2]
        with pytest.raises(EncoderError, match="scale it down"):
            remote.embed([b"x" * 5000], patches=False)


def test_a_busy_server_is_asked_again_when_it_says():
    served = Moody(app(Fake(), None), "/embed", 429, 2, [(b"retry-after", b"0.3")])
    with running(served) as url:
        remote = Http(url, **QUICK)
        assert remote.embed([b"x"], patches=False).pooled.shape == (1, 3)
    first, second, third, _probe = served.at
    assert second - first >= 0.29
    assert third - second >= 0.29


def test_a_failing_server_is_given_up_after_growing_waits():
    served = Moody(app(Fake(), None), "/embed", 503, 10**6)
    with running(served) as url:
        remote = Http(url, retries=3, wait=0.1)
        with pytest.raises(
            EncoderError, match=r"failed 4 times \(503 .*what it has embedded is kept"
        ):
            remote.embed([b"x"], patches=False)
    waits = np.diff(served.at)
    assert len(waits) == 3
    assert (waits >= np.array([0.05, 0.1, 0.2])).all()


def test_no_wait_is_longer_than_the_bound(monkeypatch):
    slept = []
    served = Moody(app(Fake(), None), "/embed", 429, 2, [(b"retry-after", b"86400")])
    with running(served) as url:
        remote = Http(url, **QUICK)
        monkeypatch.setattr("fedvlm.encoders.http.time.sleep", slept.append)
        remote.embed([b"x"], patches=False)
    assert slept == [60.0, 60.0]


def test_retry_after_may_be_a_date_or_nonsense():
    from email.utils import formatdate

    from fedvlm.encoders.http import _retry_after

    assert _retry_after(formatdate(time.time() + 30, usegmt=True)) == pytest.approx(30, abs=2)
    assert _retry_after("soon") is None
    assert _retry_after(None) is None


def test_a_dead_server_says_so():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(
        EncoderError, match=r"failed 2 times \(ConnectError.*whether the server runs"
    ):
        Http(f"http://127.0.0.1:{port}", retries=1, wait=0.01)


def test_a_silent_server_times_out():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(EncoderError, match="ReadTimeout"):
            Http(url, retries=1, wait=0.01, timeout=0.2)


def test_the_token_opens_the_door_and_nothing_else_does(tmp_path, monkeypatch):
    (tmp_path / "right").write_text("sesame-42\n")
    (tmp_path / "wrong").write_text("sesame-43\n")
    with running(app(Fake(), "sesame-42")) as url:
        for path in ("/info", "/embed", "/text"):
            verb = "GET" if path == "/info" else "POST"
            assert httpx.request(verb, url + path).status_code == 401
        monkeypatch.delenv("FEDVLM_ENCODER_TOKEN", raising=False)
        with pytest.raises(EncoderError, match=r"refuses the token \(401.*FEDVLM_ENCODER_TOKEN"):
            Http(url, **QUICK)
        with pytest.raises(EncoderError, match="refuses the token"):
            Http(url, token_file=tmp_path / "wrong", **QUICK)
        assert Http(url, token_file=tmp_path / "right", **QUICK).dim == 3
        monkeypatch.setenv("FEDVLM_ENCODER_TOKEN", "sesame-42")
        assert Http(url, **QUICK).dim == 3
    with pytest.raises(SettingsError, match="cannot be read"):
        Http(url, token_file=tmp_path / "none")


def nan_in_second(batch, call):
    pooled = np.ones((len(batch), 3), np.float32)
    pooled[-1, 0] = np.nan
    return pooled


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (nan_in_second, "NaN or infinity in pooled of row 1 of 2"),
        (lambda batch, call: np.ones((len(batch), 4), np.float32), "should have length 3"),
        (lambda batch, call: np.ones((1, 3), np.float32), r"pooled of \(1, 3\) to 2 rows"),
    ],
)
def test_vectors_that_cannot_be_right_are_refused(answer, message):
    with running(app(Fake(answer), None)) as url, pytest.raises(EncoderError, match=message):
        Http(url, **QUICK).embed([b"x", b"y"], patches=False)


def test_drift_is_reported_and_the_first_vector_is_kept():
    def drifting(batch, call):
        return np.array([[1.0, 0.1 * call, 0.0]] * len(batch), np.float32)

    said = []
    with running(app(Fake(drifting), None)) as url:
        remote = Http(url, warn=said.append, **QUICK)
        assert remote.drift is None
        kept = remote.embed([b"x"], patches=False).pooled
    assert np.allclose(kept, [[1.0, 0.1, 0.0]])
    assert remote.drift == pytest.approx(0.0966, abs=1e-3)
    assert len(said) == 1
    assert "two embeddings 0.097 apart" in said[0]


def test_an_encoder_changed_in_mid_run_is_noticed():
    fake = Fake()
    served = app(fake, None)
    with running(served) as url:
        port = int(url.rsplit(":", 1)[1])
        remote = Http(url, **QUICK)
        remote.embed([b"x"], patches=False)
    fake.identity = {"weights": "two"}
    with socket.create_server(("127.0.0.1", port)) as same:
        server = uvicorn.Server(uvicorn.Config(app(fake, None), log_config=None, ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [same]})
        thread.start()
        with pytest.raises(EncoderError, match="was changed while it was in use"):
            remote.embed([b"x"], patches=False)
        server.should_exit = True
        thread.join(10)


def test_what_is_not_an_encoder_server_is_refused():
    async def other(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"hello": 1}'})

    with running(other) as url, pytest.raises(EncoderError, match="as an encoder server"):
        Http(url, **QUICK)


def post(url, path, body):
    return httpx.post(url + path, content=body if type(body) is bytes else json.dumps(body))


def test_requests_that_cannot_be_served_get_a_reason(clip, clip_url):
    good = b64encode(picture()).decode()
    bad = b64encode(b"no picture").decode()
    answer = post(clip_url, "/embed", {"pictures": [good, bad]})
    assert (answer.status_code, answer.json()["index"]) == (422, 1)
    answer = post(clip_url, "/embed", {"pictures": [good, good, "%%%"]})
    assert (answer.status_code, answer.json()["index"]) == (422, 2)
    for body in (b"{", [], {}, {"pictures": []}, {"pictures": [1]}, {"pictures": "x"}):
        assert post(clip_url, "/embed", body).status_code == 422
    assert post(clip_url, "/embed", {"pictures": [good], "patches": 1}).status_code == 422
    assert post(clip_url, "/text", {"sentences": ["a " * 50]}).status_code == 422
    with running(app(clip, None, max_bytes=5000, max_batch=2)) as url:
        assert post(url, "/embed", {"pictures": [good] * 3}).status_code == 413
        assert post(url, "/embed", b"x" * 5001).status_code == 413
        assert post(url, "/embed", {"pictures": [good] * 2}).status_code == 200
        chunks = httpx.post(f"{url}/embed", content=iter([b"x" * 3000] * 2))
        assert chunks.status_code == 413
    with running(app(Fake(), None)) as url:
        assert post(url, "/text", {"sentences": ["a"]}).status_code == 404
        with pytest.raises(EncoderError, match="has no text"):
            Http(url, **QUICK).embed_text(["a"])


def test_an_encoder_that_breaks_answers_500_without_its_reasons():
    def broken(batch, call):
        raise RuntimeError("/secret/place")

    with running(app(Fake(broken), None)) as url:
        answer = post(url, "/embed", {"pictures": [b64encode(b"x").decode()]})
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_the_log_counts_and_never_shows(caplog):
    caplog.set_level(logging.INFO, "fedvlm.serve")
    body = {"pictures": [b64encode(b"private").decode()]}
    with running(app(Fake(), None)) as url:
        post(url, "/embed", body)
    size = len(json.dumps(body))
    line = next(one.getMessage() for one in caplog.records if one.name == "fedvlm.serve")
    assert line.startswith(f"/embed rows=1 bytes={size} seconds=0.")
    assert line.endswith("status=200")
    assert body["pictures"][0] not in caplog.text
    assert "private" not in caplog.text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", directory / "key.pem", "-out", directory / "cert.pem"]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*words, *subject, *files], check=True, capture_output=True)
    return directory


def test_tls_is_spoken_and_checked(certificate, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("sesame")
    servers, urls = [], []

    class Known(uvicorn.Server):
        def __init__(self, config):
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(uvicorn, "Server", Known)
    settings = {"port": 0, "token_file": tmp_path / "token", "ready": urls.append}
    tls = {"tls_cert": certificate / "cert.pem", "tls_key": certificate / "key.pem"}
    thread = threading.Thread(target=serve, args=(Fake(),), kwargs={**settings, **tls})
    thread.start()
    while not servers or not servers[0].started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        assert urls[0].startswith("https://127.0.0.1:")
        options = {"token_file": tmp_path / "token", **QUICK}
        remote = open_encoder(urls[0], ca_file=certificate / "cert.pem", **options)
        assert remote.embed([b"x"], patches=False).pooled.shape == (1, 3)
        with pytest.raises(EncoderError, match="name its issuer in ca_file"):
            open_encoder(urls[0], **options)
    finally:
        del remote  # closes its connection, without which the server would wait for it
        servers[0].should_exit = True
        thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_without_a_token_only_this_machine_is_served(host):
    with pytest.raises(SettingsError, match="name a token_file"):
        serve(Fake(), host=host)


def test_serving_refuses_what_cannot_work(tmp_path, certificate):
    key = certificate / "key.pem"
    with pytest.raises(SettingsError, match="name both"):
        serve(Fake(), tls_cert=key)
    with pytest.raises(SettingsError, match="there is no TLS file"):
        serve(Fake(), tls_cert=tmp_path / "none", tls_key=key)
    with pytest.raises(SettingsError, match="are no TLS pair"):
        serve(Fake(), tls_cert=key, tls_key=key)
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(SettingsError, match="one line of visible ASCII"):
        serve(Fake(), token_file=tmp_path / "empty")
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(SettingsError, match="choose another host or port"):
        serve(Fake(), port=taken.getsockname()[1])
