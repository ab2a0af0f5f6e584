"""The same channel through Flower's messages: the same numbers, and nothing kept by it leaves."""

from dataclasses import replace

import pytest
import torch

from fedvlm.channel import Channel
from fedvlm.channel.steps import to_secagg
from fedvlm.core import make
from fedvlm.engines.flower.engine import InProcessEngine
from fedvlm.engines.flower.messages import from_records
from fedvlm.engines.loop import finish_training, initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan
from fedvlm.errors import FederationError, SettingsError
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


SECURE = Channel(clip=0.5, secure=True)


@pytest.mark.parametrize("method", ["fedavg", "fedot"])
def test_secagg_gives_the_plain_mean_and_the_server_sees_no_upload(method, monkeypatch):
    from fedvlm.engines.flower import engine as flower

    observed = []
    real = flower.FlowerEngine.exchange_masked

    def watch(self, parcels, number):
        replies, total = real(self, parcels, number)
        observed.append([reply.arrays for reply in replies.values()])
        return replies, total

    monkeypatch.setattr(flower.FlowerEngine, "exchange_masked", watch)
    plain, plain_lines = learnt(replace(SECURE, secure=False), Sequential, method)
    hidden, secure_lines = learnt(SECURE, InProcessEngine, method)
    assert max_relative_difference(hidden.shared, plain.shared) < 1e-6
    assert all(arrays == {} for message_arrays in observed for arrays in message_arrays)
    assert [message_arrays["bytes_up"] for message_arrays in secure_lines[0]["clients"].values()] == [
        (4 * 16 + 1) * 8
    ] * 4
    assert "cosine" not in secure_lines[0]
    assert [line["loss"] for line in plain_lines] == pytest.approx([line["loss"] for line in secure_lines])


def secure_engine(monkeypatch, spoil):
    """An engine whose clients' answers are spoilt before they are masked."""
    from fedvlm.engines.flower import client as flower_client

    real = flower_client.TrainingHandler.answer

    def answer(self, message, state):
        spoil(message)
        return real(self, message, state)

    monkeypatch.setattr(flower_client.TrainingHandler, "answer", answer)
    world = replace(toy_world(make("fedavg", rounds=1, lr=0.01)), channel=SECURE)
    engine = InProcessEngine(world)
    state, initial_local = initial_state(world)
    return world, engine, state, initial_local


def run_one(world, engine, state, initial_local):
    plan = Plan(tuple(sorted(world.members)), ())
    lines = []
    state = run_rounds(world, engine, plan, state, initial_local, lambda state, line: lines.append(line))
    return state, lines


def test_a_site_that_fails_in_a_secure_round_is_named_and_the_sum_of_the_others_stands(monkeypatch):
    def spoil(message):
        if message.header["client"] == "client-1":
            raise FederationError("its rows are gone")

    world, engine, state, initial_local = secure_engine(monkeypatch, spoil)
    engine.quorum = 0.5
    after, [line] = run_one(world, engine, state, initial_local)
    assert "its rows are gone" in line["missing"]["client-1"]
    assert set(line["clients"]) == {"client-0", "client-2", "client-3"}
    members = {id: member for id, member in world.members.items() if id != "client-1"}
    remaining = replace(world, members=members, channel=replace(SECURE, secure=False))
    expected, _ = run_one(remaining, Sequential(remaining), *initial_state(remaining))
    assert max_relative_difference(after.shared, expected.shared) < 1e-6


def test_below_the_quorum_a_secure_round_stops_and_says_why(monkeypatch):
    def spoil(message):
        if message.header["client"] != "client-1":
            raise FederationError("its rows are gone")

    with pytest.raises(FederationError, match="of 4 clients answered(.|\n)*its rows are gone"):
        run_one(*secure_engine(monkeypatch, spoil))


def test_an_upload_for_a_secure_sum_never_leaves_without_its_mask():
    from fedvlm.engines.flower.messages import Message
    from fedvlm.engines.flower.secure import wrap_reply

    with pytest.raises(FederationError, match="requested without a mask"):
        wrap_reply(Message({"masked": True}), hidden=False)


def test_two_clients_are_too_few_to_hide_among():
    world = toy_world(make("fedavg", rounds=1))
    members = {id: world.members[id] for id in ("client-0", "client-1")}
    world = replace(world, members=members, channel=SECURE)
    with pytest.raises(FederationError, match="takes three to a thousand; 2 are there"):
        run_one(world, InProcessEngine(world), *initial_state(world))


def test_nan_and_numbers_out_of_range_are_refused_before_they_are_masked():
    sent = {"head": torch.zeros(4, 16)}
    for bad in (torch.nan, 1e6):
        upload = {"head": torch.full((4, 16), bad)}
        with pytest.raises(FederationError, match="client a: 64 of 64 numbers of 'head'.*±8"):
            to_secagg(upload, sent, 1.0, SECURE, "client a")


@pytest.mark.parametrize(
    ("method", "channel", "error"),
    [
        ("fedavg", Channel(secure=True), "set channel.clip"),
        ("tofa", SECURE, "tofa uploads sums that are not within a fixed range"),
        ("fens", SECURE, "fens aggregates single uploads"),
    ],
)
def test_what_secagg_cannot_sum_is_refused_before_any_work(method, channel, error):
    world = toy_world(make(method))
    with pytest.raises(SettingsError, match=error):
        InProcessEngine(replace(world, channel=channel))
