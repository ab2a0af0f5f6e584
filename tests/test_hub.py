"""A Hub that cannot be reached is one sentence, soon; a model that is cached needs none."""

import socket
from time import monotonic

import pytest

from fedvlm import hub
from fedvlm.data import open_dataset
from fedvlm.encoders import open_encoder
from fedvlm.errors import DataError, EncoderError

LIMIT = 20.0  # seconds; two are meant, and a busy machine is given more
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HF_HUB_OFFLINE")


@pytest.fixture
def bare(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@pytest.fixture
def silent(bare):
    """A Hub that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        bare.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.fixture
def proxied(bare):
    """A proxy that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        bare.delenv("HF_ENDPOINT", raising=False)
        bare.setenv("https_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.mark.parametrize("address", ["silent", "proxied"])
def test_a_hub_that_never_answers_is_given_up_soon_in_one_sentence(request, address):
    request.getfixturevalue(address)
    start = monotonic()
    with pytest.raises(EncoderError, match="does not answer") as refused:
        open_encoder("hf:some/model")
    assert monotonic() - start < LIMIT
    assert "hf:some/model cannot be opened" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_data_of_a_hub_that_never_answers_are_given_up_too(silent):
    start = monotonic()
    with pytest.raises(DataError, match="some/set cannot be loaded .the Hub at http") as refused:
        open_dataset("hub:some/set")
    assert monotonic() - start < LIMIT
    assert "\n" not in str(refused.value)


def test_patience_is_below_two_seconds():
    assert hub.TIMEOUT_SECONDS < 2


def test_a_hub_that_refuses_connections_does_not_answer(bare):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    bare.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    assert hub.unreachable_reason() == f"the Hub at http://127.0.0.1:{port} does not answer"


def test_nobody_is_asked_when_the_hub_is_switched_off(silent, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.unreachable_reason() == ""


def test_a_cached_model_is_read_without_the_hub(silent, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "is_cached", lambda name: True)
    assert hub.is_local_only("some/model")
    assert hub.is_local_only(tmp_path)
