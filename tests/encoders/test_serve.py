import json
import logging
import socket
import subprocess
import threading
import time
from base64 import b64encode

import httpx
import pytest
import uvicorn

from fedvlm.encoders import fingerprint, open_encoder
from fedvlm.encoders.http import Http
from fedvlm.encoders.huggingface import HuggingFace
from fedvlm.encoders.serve import create_app, serve
from fedvlm.errors import EncoderError, SettingsError
from tests.helpers import tiny_models
from tests.helpers.live_server import QUICK, Fake, image, running


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return HuggingFace(tiny_models.clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def clip_url(clip):
    with running(create_app(clip, None)) as url:
        yield url


def test_a_server_offers_embeddings_and_never_the_tower(clip, clip_url):
    info = httpx.get(f"{clip_url}/info").json()
    assert info["offers"] == ["image", "patches", "text"]
    assert info["fingerprint"] == fingerprint(clip)
    assert "/" not in info["name"]
    assert open_encoder(clip_url).offers == {"image", "patches", "text"}  # http://... alone
    assert httpx.get(f"{clip_url}/docs").status_code == 404
    assert httpx.get(f"{clip_url}/weights").status_code == 404


def post(url, path, body):
    return httpx.post(url + path, content=body if type(body) is bytes else json.dumps(body))


def test_requests_that_cannot_be_served_get_a_reason(clip, clip_url):
    good = b64encode(image()).decode()
    bad = b64encode(b"no image").decode()
    answer = post(clip_url, "/embed", {"images": [good, bad]})
    assert (answer.status_code, answer.json()["index"]) == (422, 1)
    answer = post(clip_url, "/embed", {"images": [good, good, "%%%"]})
    assert (answer.status_code, answer.json()["index"]) == (422, 2)
    for body in (b"{", [], {}, {"images": []}, {"images": [1]}, {"images": "x"}):
        assert post(clip_url, "/embed", body).status_code == 422
    assert post(clip_url, "/embed", {"images": [good], "patches": 1}).status_code == 422
    assert post(clip_url, "/text", {"sentences": ["a " * 50]}).status_code == 422
    with running(create_app(clip, None, max_bytes=5000, max_batch=2)) as url:
        assert post(url, "/embed", {"images": [good] * 3}).status_code == 413
        assert post(url, "/embed", b"x" * 5001).status_code == 413
        assert post(url, "/embed", {"images": [good] * 2}).status_code == 200
        chunks = httpx.post(f"{url}/embed", content=iter([b"x" * 3000] * 2))
        assert chunks.status_code == 413
    with running(create_app(Fake(), None)) as url:
        assert post(url, "/text", {"sentences": ["a"]}).status_code == 404
        with pytest.raises(EncoderError, match="has no text"):
            Http(url, **QUICK).embed_text(["a"])


def test_an_encoder_that_breaks_answers_500_without_its_reasons():
    def broken(batch, call):
        raise RuntimeError("/secret/place")

    with running(create_app(Fake(broken), None)) as url:
        answer = post(url, "/embed", {"images": [b64encode(b"x").decode()]})
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_the_log_counts_and_never_shows(caplog):
    caplog.set_level(logging.INFO, "fedvlm.serve")
    body = {"images": [b64encode(b"private").decode()]}
    with running(create_app(Fake(), None)) as url:
        post(url, "/embed", body)
    size = len(json.dumps(body))
    line = next(record.getMessage() for record in caplog.records if record.name == "fedvlm.serve")
    assert line.startswith(f"/embed rows=1 bytes={size} seconds=0.")
    assert line.endswith("status=200")
    assert body["images"][0] not in caplog.text
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

    class RecordingServer(uvicorn.Server):
        def __init__(self, config):
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(uvicorn, "Server", RecordingServer)
    settings = {"port": 0, "token_file": tmp_path / "token", "ready": urls.append}
    tls = {"tls_cert": certificate / "cert.pem", "tls_key": certificate / "key.pem"}
    thread = threading.Thread(target=serve, args=(lambda token: create_app(Fake(), token),), kwargs={**settings, **tls})
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
        serve(lambda token: create_app(Fake(), token), host=host)


def test_serving_refuses_what_cannot_work(tmp_path, certificate):
    key = certificate / "key.pem"
    with pytest.raises(SettingsError, match="name both"):
        serve(lambda token: create_app(Fake(), token), tls_cert=key)
    with pytest.raises(SettingsError, match="there is no TLS file"):
        serve(lambda token: create_app(Fake(), token), tls_cert=tmp_path / "none", tls_key=key)
    with pytest.raises(SettingsError, match="are no TLS pair"):
        serve(lambda token: create_app(Fake(), token), tls_cert=key, tls_key=key)
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(SettingsError, match="one line of visible ASCII"):
        serve(lambda token: create_app(Fake(), token), token_file=tmp_path / "empty")
    occupied = socket.create_server(("127.0.0.1", 0))
    with occupied, pytest.raises(SettingsError, match="choose another host or port"):
        serve(lambda token: create_app(Fake(), token), port=occupied.getsockname()[1])
