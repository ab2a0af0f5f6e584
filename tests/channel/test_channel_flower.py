"""The same channel through Flower's messages: the same numbers, and nothing kept by it leaves."""

from dataclasses import replace

import pytest

from fedvlm.channel import Channel
from fedvlm.core import make
from fedvlm.engines.flower_local import InProcess
from fedvlm.engines.rounds import Plan, finish, start, train
from fedvlm.engines.single import Single
from fedvlm.tensors import difference
from fedvlm.testing import toy_world

CHANNELS = {
    "clip": Channel(clip=0.05),
    "noise": Channel(clip=0.05, noise=0.3),
    "quantise": Channel(quantise=True),
    "all": Channel(clip=0.05, noise=0.1, quantise=True),
}


def learnt(channel, engine):
    world = replace(toy_world(make("fedot", rounds=3, rate=0.01)), channel=channel)
    plan = Plan(tuple(sorted(world.members)), ())
    state, fresh = start(world)
    lines = []
    engine = engine(world)
    state = train(world, engine, plan, state, fresh, lambda state, line: lines.append(line))
    return finish(world, engine, plan, state, fresh), lines


@pytest.mark.parametrize("name", CHANNELS)
def test_flower_and_a_plain_loop_agree_behind_every_channel(name):
    plain, told = learnt(CHANNELS[name], Single)
    flower, said = learnt(CHANNELS[name], InProcess)
    assert difference(flower.shared, plain.shared) < 1e-6
    for id, local in plain.local.items():
        assert flower.local[id].keys() == local.keys()
        assert difference(flower.local[id], local) < 1e-6
    sizes = [[one["bytes_up"] for one in line["clients"].values()] for line in told]
    assert sizes == [[one["bytes_up"] for one in line["clients"].values()] for line in said]
    assert [line.get("epsilon") for line in told] == [line.get("epsilon") for line in said]


def test_what_the_channel_keeps_is_in_no_message():
    world = toy_world(make("fedot", rounds=1, rate=0.01))
    world = replace(world, channel=CHANNELS["quantise"])
    engine = InProcess(world)
    state, fresh = start(world)
    train(world, engine, Plan(tuple(sorted(world.members)), ()), state, fresh, lambda *_: None)
    names = {key for message in engine.grid.messages for key in message.content["arrays"]}
    assert names == {"head", "head/scale"}
    assert any("channel/left/head" in str(engine.grid.state(id).about) for id in world.members)
