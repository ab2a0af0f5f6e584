"""Noise at deployed sites is drawn again by nobody; simulations repeat theirs."""

from dataclasses import replace

import pytest
import torch

from fedvlm import seeds
from fedvlm.core import make
from fedvlm.engines.client import channel_noise, make_client
from fedvlm.storage.files import read_tensors
from fedvlm.testing import toy_world

METHODS = [
    make("tofa", noise_multiplier=1.0),
    make("dp-fpl", rounds=1, batch_size=16),
]
CHANNEL = {"clip": 0.1, "noise_multiplier": 0.5}


def same_seed(monkeypatch):
    """Every generator starts at 0, also one that is seeded by the system's entropy."""
    fixed = torch.Generator().manual_seed
    monkeypatch.setattr(seeds, "generator", lambda *words: fixed(0))
    monkeypatch.setattr("fedvlm.engines.client.randbits", lambda bits: 0, raising=False)


@pytest.mark.parametrize("method", METHODS, ids=lambda first: first.name)
def test_a_methods_noise_at_a_site_has_no_seed(method, monkeypatch):
    same_seed(monkeypatch)
    world = toy_world(method, sizes=(40, 9))
    first, two = (make_client(replace(world, secret_noise=True), "client-0", 0).noise for _ in range(2))
    assert first.shape == two.shape and first.numel() and (first != two).all()
    first, two = (make_client(world, "client-0", 0).noise for _ in range(2))
    assert torch.equal(first, two)


def test_a_channels_noise_at_a_site_has_no_seed(monkeypatch):
    same_seed(monkeypatch)
    world = toy_world(make("fedavg"))
    site = replace(world, secret_noise=True)
    assert (channel_noise(site, "client-0", 0)(50) != channel_noise(site, "client-0", 0)(50)).all()
    assert torch.equal(channel_noise(world, "client-0", 0)(50), channel_noise(world, "client-0", 0)(50))


def head(result):
    return read_tensors(result.folder / "trainings/0-all.safetensors")[0]["shared/head"]


def test_the_upload_of_a_site_cannot_be_had_again(place, monkeypatch):
    """The same round over the same sites twice, with every seed known: only the noise differs."""
    same_seed(monkeypatch)
    uploads_seen = []
    plain = []
    for rate in (1e-3, 1.0001e-3):  # the very same training would be answered as before
        settings = place.settings({"name": "fedavg", "rounds": 1, "lr": rate}, channel=CHANNEL)
        uploads_seen.append(head(place.run(settings, f"site {rate}")))
        plain.append(head(place.alone(settings, f"alone {rate}")))
    assert (plain[0] - plain[1]).abs().max() < 1e-4
    assert (uploads_seen[0] - uploads_seen[1]).abs().mean() > 1e-3
