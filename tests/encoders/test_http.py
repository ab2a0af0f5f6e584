import socket
import threading
import time
from email.utils import formatdate

import httpx
import numpy as np
import pytest
import torch
import uvicorn

from fedvlm.encoders import WarningEncoder, open_encoder
from fedvlm.encoders.http import Http, _retry_after
from fedvlm.encoders.huggingface import HuggingFace
from fedvlm.encoders.serve import create_app
from fedvlm.errors import EncoderError, SettingsError
from tests.helpers import tiny_models
from tests.helpers.live_server import QUICK, Fake, Moody, image, running


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return HuggingFace(tiny_models.clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def clip_url(clip):
    with running(create_app(clip, None)) as url:
        yield url


def test_vectors_over_http_are_those_of_the_encoder_itself(clip, clip_url):
    from fedvlm.encoders.images import decode

    remote = open_encoder(f"http:{clip_url}")
    files = [image(seed) for seed in range(5)]
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


def test_batches_are_cut_to_what_the_server_takes():
    fake = Fake()
    with running(create_app(fake, None, max_bytes=4000, max_batch=4)) as url:
        remote = Http(url, **QUICK)
        assert remote.embed([b"x" * 10] * 9, patches=False).pooled.shape == (9, 3)
        assert fake.calls == [4, 4, 1, 1]  # the last is the probe
        fake.calls.clear()
        remote.embed([b"x" * 1000] * 4, patches=False)
        assert fake.calls == [2, 2]
        with pytest.raises(EncoderError, match="scale it down"):
            remote.embed([b"x" * 5000], patches=False)


def test_a_busy_server_is_asked_again_when_it_says():
    served = Moody(create_app(Fake(), None), "/embed", 429, 2, [(b"retry-after", b"0.3")])
    with running(served) as url:
        remote = Http(url, **QUICK)
        assert remote.embed([b"x"], patches=False).pooled.shape == (1, 3)
    first, second, third, _probe = served.at
    assert second - first >= 0.29
    assert third - second >= 0.29


def test_a_failing_server_is_given_up_after_growing_waits():
    served = Moody(create_app(Fake(), None), "/embed", 503, 10**6)
    with running(served) as url:
        remote = Http(url, retries=3, wait=0.1)
        with pytest.raises(EncoderError, match=r"failed 4 times \(503 .*finished embeddings are cached"):
            remote.embed([b"x"], patches=False)
    waits = np.diff(served.at)
    assert len(waits) == 3
    assert (waits >= np.array([0.05, 0.1, 0.2])).all()


def test_no_wait_is_longer_than_the_bound(monkeypatch):
    slept = []
    served = Moody(create_app(Fake(), None), "/embed", 429, 2, [(b"retry-after", b"86400")])
    with running(served) as url:
        remote = Http(url, **QUICK)
        monkeypatch.setattr("fedvlm.encoders.http.time.sleep", slept.append)
        remote.embed([b"x"], patches=False)
    assert slept == [60.0, 60.0]


def test_retry_after_may_be_a_date_or_nonsense():
    assert _retry_after(formatdate(time.time() + 30, usegmt=True)) == pytest.approx(30, abs=2)
    assert _retry_after("soon") is None
    assert _retry_after(None) is None


def test_a_dead_server_says_so():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(EncoderError, match=r"failed 2 times \(ConnectError.*whether the server runs"):
        Http(f"http://127.0.0.1:{port}", retries=1, wait=0.01)


def test_a_silent_server_times_out():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(EncoderError, match="ReadTimeout"):
            Http(url, retries=1, wait=0.01, timeout=0.2)


def test_the_token_opens_the_door_and_nothing_else_does(tmp_path, monkeypatch):
    (tmp_path / "right").write_text("sesame-42\n")
    (tmp_path / "wrong").write_text("sesame-43\n")
    with running(create_app(Fake(), "sesame-42")) as url:
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
        (lambda batch, call: np.ones((len(batch), 4), np.float32), "must have length 3"),
        (lambda batch, call: np.ones((1, 3), np.float32), r"pooled of \(1, 3\) for 2 rows"),
    ],
)
def test_vectors_that_cannot_be_right_are_refused(answer, message):
    with running(create_app(Fake(answer), None)) as url, pytest.raises(EncoderError, match=message):
        Http(url, **QUICK).embed([b"x", b"y"], patches=False)


def test_drift_is_reported_and_the_first_vector_is_kept():
    def drifting(batch, call):
        return np.array([[1.0, 0.1 * call, 0.0]] * len(batch), np.float32)

    warnings = []
    with running(create_app(Fake(drifting), None)) as url:
        remote = Http(url, **QUICK)
        assert isinstance(remote, WarningEncoder)
        remote.warn = warnings.append
        assert remote.drift is None
        pooled = remote.embed([b"x"], patches=False).pooled
    assert np.allclose(pooled, [[1.0, 0.1, 0.0]])
    assert remote.drift == pytest.approx(0.0966, abs=1e-3)
    assert len(warnings) == 1
    assert "two embeddings of the same image that differ by 0.097" in warnings[0]


def test_an_encoder_changed_in_mid_run_is_noticed():
    fake = Fake()
    served = create_app(fake, None)
    with running(served) as url:
        port = int(url.rsplit(":", 1)[1])
        remote = Http(url, **QUICK)
        remote.embed([b"x"], patches=False)
    fake.identity = {"weights": "two"}
    with socket.create_server(("127.0.0.1", port)) as same:
        server = uvicorn.Server(uvicorn.Config(create_app(fake, None), log_config=None, ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [same]})
        thread.start()
        with pytest.raises(EncoderError, match="was changed while it was in use"):
            remote.embed([b"x"], patches=False)
        server.should_exit = True
        thread.join(10)


def test_what_is_not_an_encoder_server_is_refused():
    async def unrelated_app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"hello": 1}'})

    with running(unrelated_app) as url, pytest.raises(EncoderError, match="of an encoder server"):
        Http(url, **QUICK)
