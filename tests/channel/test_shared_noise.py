"""Noise inside a verified sum: each of the members that are trusted adds a part of it."""

import math
from dataclasses import replace

import pytest
import torch

from fedvlm.channel import Channel
from fedvlm.channel.verified import class_limits, count_classes
from fedvlm.deploy.messages import RequestRefused
from fedvlm.deploy.site.policy import Policy
from fedvlm.engines.client import make_client
from fedvlm.errors import SettingsError
from fedvlm.maths.privacy import epsilon
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build

OWN_TEST = {"protocol": "own-test", "method": "tofa"}


def world_of(rows, **channel):
    prepared = prepare(build({**OWN_TEST, "channel": channel}), rows, 0)
    (training,) = prepared.trainings
    return prepared.world(training)


def test_epsilon_finds_the_noise_of_tofa_and_of_clipped_changes():
    settings = build({**OWN_TEST, "channel": {"epsilon": 4}})
    assert epsilon(settings.method.noise_multiplier, settings.method.rounds) == pytest.approx(4, rel=2e-3)
    assert build(settings.identity()).method == settings.method  # a record gives the same again
    clipped = build({"method": {"name": "fedavg", "rounds": 5}, "channel": {"epsilon": 4, "clip": 1.0}})
    assert epsilon(clipped.channel.noise_multiplier, 5) == pytest.approx(4, rel=2e-3)


@pytest.mark.parametrize(
    ("method", "channel", "message"),
    [
        ("fedavg", {"epsilon": 4}, "finds no noise for fedavg"),
        ("auto", {"epsilon": 4}, "finds no noise for auto"),
        ("tofa", {"honest": 3}, "inside a verified sum"),
        ("fedavg", {"honest": 3, "verified": True, "clip": 1.0}, "shares noise on sums over samples"),
        ("tofa", {"epsilon": -1}, "epsilon must be at least 0"),
        ("tofa", {"honest": 0}, "honest must be"),
    ],
)
def test_noise_that_cannot_be_found_or_shared_is_refused(method, channel, message):
    with pytest.raises(SettingsError, match=message):
        build({"protocol": "own-test", "method": method, "channel": channel})


def test_each_of_t_members_adds_its_part_and_the_sum_has_all(rows):
    alone, shared = world_of(rows, epsilon=4), world_of(rows, epsilon=4, verified=True, honest=4)
    ids = sorted(alone.members)
    for id in ids:
        full, part = make_client(alone, id, 0).noise, make_client(shared, id, 0).noise
        assert torch.allclose(part, full / math.sqrt(4))
    draws = torch.stack([make_client(shared, f"{id}", number).noise.flatten() for id in ids[:1] for number in range(4)])
    assert float(draws.sum(0).std()) == pytest.approx(1.0, rel=0.1)


def test_with_noise_no_exact_count_leaves_and_no_class_is_closed(rows):
    noisy = world_of(rows, epsilon=4, verified=True).method
    total = count_classes(torch.tensor([0, 0, 1]), 4, noisy)
    assert not any(value.any() for value in total.values())
    assert class_limits(noisy, 16, total) == {}
    plain = replace(noisy, noise_multiplier=0.0)
    assert count_classes(torch.zeros(20, dtype=torch.int64), 4, plain)["counts"][0] == 20


def test_a_site_shares_noise_with_as_many_as_its_policy_trusts():
    method = build({**OWN_TEST, "channel": {"epsilon": 4}}).method
    labels = torch.zeros(50, dtype=torch.int64).numpy()
    channel = Channel(verified=True, honest=3)
    with pytest.raises(RequestRefused, match="honest must be at most 1"):
        Policy(methods=("tofa",)).admit(method, channel, labels)
    Policy(methods=("tofa",), honest=3).admit(method, channel, labels)
    assert Policy(honest=3).with_min_class_samples(replace(method, min_class_samples=1)).min_class_samples == 1
    assert Policy().with_min_class_samples(replace(method, min_class_samples=1)).min_class_samples == 16
