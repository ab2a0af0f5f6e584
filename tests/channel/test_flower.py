"""The same channel through Flower's messages: the same numbers, and nothing kept by it leaves."""

from dataclasses import replace

import pytest
import torch

from fedvlm.channel import Channel
from fedvlm.channel.secure import to_secagg
from fedvlm.core import make
from fedvlm.engines.flower.local import InProcess
from fedvlm.engines.flower.wire import from_records
from fedvlm.engines.loop import finish, start, train
from fedvlm.engines.single import Single
from fedvlm.engines.state import Plan
from fedvlm.errors import FederationError, SettingsError
from fedvlm.tensors import difference
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
    world = toy_world(make("fedot", rounds=1, lr=0.01))
    world = replace(world, channel=CHANNELS["quantise"])
    engine = InProcess(world)
    state, fresh = start(world)
    train(world, engine, Plan(tuple(sorted(world.members)), ()), state, fresh, lambda *_: None)
    sent = [from_records(message.content, "") for message in engine.grid.messages]
    names = {key for parcel in sent for key in parcel.arrays}
    assert names == {"head", "head/scale"}
    assert any("channel/left/head" in str(engine.grid.state(id).about) for id in world.members)


SECURE = Channel(clip=0.5, secure=True)


@pytest.mark.parametrize("method", ["fedavg", "fedot"])
def test_secagg_gives_the_plain_mean_and_the_server_sees_no_upload(method, monkeypatch):
    from fedvlm.engines.flower import engine as flower

    seen = []
    real = flower.Flower.exchange_masked

    def watch(self, parcels, number):
        replies, total = real(self, parcels, number)
        seen.append([reply.arrays for reply in replies.values()])
        return replies, total

    monkeypatch.setattr(flower.Flower, "exchange_masked", watch)
    plain, told = learnt(replace(SECURE, secure=False), Single, method)
    hidden, said = learnt(SECURE, InProcess, method)
    assert difference(hidden.shared, plain.shared) < 1e-6
    assert all(arrays == {} for one in seen for arrays in one)
    assert [one["bytes_up"] for one in said[0]["clients"].values()] == [(4 * 16 + 1) * 8] * 4
    assert "cosine" not in said[0]
    assert [line["loss"] for line in told] == pytest.approx([line["loss"] for line in said])


def secure_engine(monkeypatch, spoil):
    """An engine whose clients' answers are spoilt before they are masked."""
    from fedvlm.engines.flower import client as flower_client

    real = flower_client.Desk.answer

    def answer(self, parcel, state):
        spoil(parcel)
        return real(self, parcel, state)

    monkeypatch.setattr(flower_client.Desk, "answer", answer)
    world = replace(toy_world(make("fedavg", rounds=1, lr=0.01)), channel=SECURE)
    engine = InProcess(world)
    state, fresh = start(world)
    return world, engine, state, fresh


def run_one(world, engine, state, fresh):
    plan = Plan(tuple(sorted(world.members)), ())
    lines = []
    state = train(world, engine, plan, state, fresh, lambda state, line: lines.append(line))
    return state, lines


def test_a_site_that_fails_in_a_secure_round_is_named_and_the_sum_of_the_others_stands(monkeypatch):
    def spoil(parcel):
        if parcel.about["client"] == "client-1":
            raise FederationError("its rows are gone")

    world, engine, state, fresh = secure_engine(monkeypatch, spoil)
    engine.quorum = 0.5
    after, [line] = run_one(world, engine, state, fresh)
    assert "its rows are gone" in line["missing"]["client-1"]
    assert set(line["clients"]) == {"client-0", "client-2", "client-3"}
    members = {id: one for id, one in world.members.items() if id != "client-1"}
    others = replace(world, members=members, channel=replace(SECURE, secure=False))
    wanted, _ = run_one(others, Single(others), *start(others))
    assert difference(after.shared, wanted.shared) < 1e-6


def test_below_the_quorum_a_secure_round_stops_and_says_why(monkeypatch):
    def spoil(parcel):
        if parcel.about["client"] != "client-1":
            raise FederationError("its rows are gone")

    with pytest.raises(FederationError, match="of 4 clients answered(.|\n)*its rows are gone"):
        run_one(*secure_engine(monkeypatch, spoil))


def test_an_upload_for_a_secure_sum_never_leaves_without_its_mask():
    from fedvlm.engines.flower.secure import records
    from fedvlm.engines.flower.wire import Parcel

    with pytest.raises(FederationError, match="asked for without a mask"):
        records(Parcel({"masked": True}), hidden=False)


def test_two_clients_are_too_few_to_hide_among():
    world = toy_world(make("fedavg", rounds=1))
    members = {id: world.members[id] for id in ("client-0", "client-1")}
    world = replace(world, members=members, channel=SECURE)
    with pytest.raises(FederationError, match="takes three to a thousand; 2 are there"):
        run_one(world, InProcess(world), *start(world))


def test_nan_and_numbers_out_of_range_are_refused_before_they_are_masked():
    sent = {"head": torch.zeros(4, 16)}
    for bad in (torch.nan, 1e6):
        upload = {"head": torch.full((4, 16), bad)}
        with pytest.raises(FederationError, match="client a: 64 of 64 numbers of 'head'.*±8"):
            to_secagg(upload, sent, 1.0, SECURE, "client a")


@pytest.mark.parametrize(
    ("method", "channel", "says"),
    [
        ("fedavg", Channel(secure=True), "set channel.clip"),
        ("tofa", SECURE, "tofa uploads sums that are not within a fixed range"),
        ("fens", SECURE, "fens aggregates single uploads"),
    ],
)
def test_what_secagg_cannot_sum_is_refused_before_any_work(method, channel, says):
    world = toy_world(make(method))
    with pytest.raises(SettingsError, match=says):
        InProcess(replace(world, channel=channel))
