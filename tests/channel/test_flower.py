"""The same channel through Flower's messages: the same numbers, and nothing kept by it leaves."""

from dataclasses import replace

import pytest

from fedvlm.channel import Channel
from fedvlm.core import make
from fedvlm.engines.flower.engine import InProcessEngine
from fedvlm.engines.flower.messages import from_records
from fedvlm.engines.loop import finish_training, initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan
from fedvlm.errors import FederationError, SettingsError
from fedvlm.runner.settings import build
from fedvlm.tensors import max_relative_difference
from fedvlm.testing import toy_world

CHANNELS = {
    "clip": Channel(clip=0.05),
    "noise_multiplier": Channel(clip=0.05, noise_multiplier=0.3),
    "quantise": Channel(quantise=True),
    "all": Channel(clip=0.05, noise_multiplier=0.1, quantise=True),
}


def learnt(channel, engine, method="fedot"):
    world = replace(toy_world(make(method, rounds=3, lr=0.01)), channel=channel)
    plan = Plan(tuple(sorted(world.members)), ())
    state, initial_local = initial_state(world)
    lines = []
    engine = engine(world)
    state = run_rounds(world, engine, plan, state, initial_local, lambda state, line: lines.append(line))
    return finish_training(world, engine, plan, state, initial_local), lines


@pytest.mark.parametrize("name", CHANNELS)
def test_flower_and_a_plain_loop_agree_behind_every_channel(name):
    plain, plain_lines = learnt(CHANNELS[name], Sequential)
    flower, flower_lines = learnt(CHANNELS[name], InProcessEngine)
    assert max_relative_difference(flower.shared, plain.shared) < 1e-6
    for id, local in plain.local.items():
        assert flower.local[id].keys() == local.keys()
        assert max_relative_difference(flower.local[id], local) < 1e-6
    sizes = [[client["bytes_up"] for client in line["clients"].values()] for line in plain_lines]
    assert sizes == [[client["bytes_up"] for client in line["clients"].values()] for line in flower_lines]
    assert [line.get("epsilon") for line in plain_lines] == [line.get("epsilon") for line in flower_lines]


def test_what_the_channel_keeps_is_in_no_message():
    world = toy_world(make("fedot", rounds=1, lr=0.01))
    world = replace(world, channel=CHANNELS["quantise"])
    engine = InProcessEngine(world)
    state, initial_local = initial_state(world)
    run_rounds(world, engine, Plan(tuple(sorted(world.members)), ()), state, initial_local, lambda *_: None)
    sent = [from_records(message.content, "") for message in engine.grid.messages]
    names = {key for channel_message in sent for key in channel_message.arrays}
    assert names == {"head", "head/scale"}
    assert any("channel/left/head" in str(engine.grid.state(id).header) for id in world.members)


VERIFIED = Channel(clip=0.5, verified=True)


@pytest.mark.parametrize("method", ["fedavg", "fedot", "scaffold"])
def test_a_verified_run_gives_the_plain_mean_and_nothing_to_compare(method):
    plain, plain_lines = learnt(replace(VERIFIED, verified=False), Sequential, method)
    hidden, lines = learnt(VERIFIED, InProcessEngine, method)
    assert max_relative_difference(hidden.shared, plain.shared) < 1e-6
    assert ("cosine" not in lines[0] and "cosine" in plain_lines[0]) or method == "scaffold"
    numbers = sum(value.numel() for value in hidden.shared.values()) if method != "scaffold" else 2 * 4 * 16
    assert [client["bytes_up"] for client in lines[0]["clients"].values()] == [(numbers + 1) * 8] * 4
    assert [line["loss"] for line in plain_lines] == pytest.approx([line["loss"] for line in lines])


def test_two_clients_are_too_few_to_hide_among():
    world = toy_world(make("fedavg", rounds=1))
    members = {id: world.members[id] for id in ("client-0", "client-1")}
    world = replace(world, members=members, channel=VERIFIED)
    plan, (state, initial_local) = Plan(tuple(sorted(world.members)), ()), initial_state(world)
    with pytest.raises(FederationError, match="needs at least 3, got 2"):
        run_rounds(world, InProcessEngine(world), plan, state, initial_local, lambda *_: None)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"method": "fedavg", "channel": {"verified": True}}, "set channel.clip"),
        ({"method": "probe"}, "does not bound its state"),
        ({"method": "fens"}, "fens aggregates single uploads"),
        ({"method": "fedavg", "fraction": 0.5}, "fraction = 0.5 do not go together"),
        ({"method": "fedavg", "protocol": "leave-one-domain-out"}, "'leave-one-domain-out' do not go together"),
        ({"method": "fedavg", "protocol": "source-target"}, "'source-target' do not go together"),
        ({"method": "fedavg", "tune": ["lr"]}, r"tune = \['lr'\] do not go together"),
    ],
)
def test_what_a_verified_sum_cannot_do_is_refused_before_any_work(settings, error):
    clip = {"verified": True, "clip": 1.0}
    with pytest.raises(SettingsError, match=error):
        build({"protocol": "own-test", "channel": clip, **settings})
