"""Flower's messages carry every method, and nothing that is local."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedvlm import tensors
from fedvlm.channel import Channel
from fedvlm.core import make, methods
from fedvlm.engines.flower.client import client_training, to_tensors
from fedvlm.engines.flower.engine import InProcessEngine
from fedvlm.engines.flower.messages import Message, from_records, seal, to_records, unseal
from fedvlm.engines.loop import finish_training, initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan
from fedvlm.errors import FederationError
from fedvlm.runner.settings import build
from fedvlm.testing import check_same, shorten, toy_world
from tests.helpers.running import execute

CLOSE = 1e-6


def learn(world, engine, lines=None, **plan):
    ids = sorted(world.members)
    plan_all = Plan(tuple(ids[:-1]), (ids[-1],), **plan)
    state, initial_local = initial_state(world)
    keep = (lambda state, line: None) if lines is None else lambda state, line: lines.append(line)
    state = run_rounds(world, engine, plan_all, state, initial_local, keep)
    return finish_training(world, engine, plan_all, state, initial_local)


@pytest.mark.parametrize("name", list(methods()))
def test_a_method_gives_the_same_numbers_through_messages(name):
    world = toy_world(shorten(make(name)))
    plain, sent = [], []
    alone = learn(world, Sequential(world), plain)
    through = learn(world, InProcessEngine(world), sent)
    check_same(through, alone, CLOSE, "flower and single engines differ")
    assert through.scores == alone.scores and through.descriptions == alone.descriptions
    for a, b in zip(plain, sent, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}  # bytes, too


@pytest.mark.parametrize("selection", ["validation", "oracle"])
def test_the_chosen_round_is_the_same_through_messages(selection):
    world = toy_world(make("fedot", rounds=4, lr=0.05))
    alone = learn(world, Sequential(world), selection=selection, fraction=0.7)
    through = learn(world, InProcessEngine(world), selection=selection, fraction=0.7)
    assert through.round == alone.round
    check_same(through, alone, CLOSE, "flower and single engines differ")


@pytest.mark.parametrize("name", list(methods()))
def test_no_message_holds_a_local_tensor(name):
    """Neither its name nor its values, in any message of a training, either way."""
    world = toy_world(shorten(make(name)))
    engine = InProcessEngine(world)
    observed = []
    pull = engine.grid.pull_messages
    engine.grid.pull_messages = lambda ids: (pull(ids), observed.extend(engine.grid.messages))[0]
    outcome = learn(world, engine)
    local = {**world.method.init(world.frozen)[1]}
    values = [value for tensor in outcome.local.values() for value in tensor.values()]
    moved = [tensor for tensor in values if tensor.numel() > 1 and tensor.unique().numel() > 1]
    assert len(observed) >= 2 * len(world.members)
    for message in observed:
        message_in = from_records(message.content, "")
        assert not set(message_in.arrays) & set(local)
        for array in message_in.arrays.values():
            sent = torch.tensor(array)
            twins = [tensor for tensor in moved if tensor.shape == sent.shape and torch.equal(tensor, sent)]
            assert not twins or tensors.max_relative_difference({"": sent}, {"": sent * 0}) == 0


def test_a_client_has_its_own_rows_and_no_others():
    world = toy_world(make("fedavg"))
    for id, member in world.members.items():
        client_world = client_training(world, id).world
        rows = np.concatenate([member.train, member.validation, member.test])
        assert torch.equal(client_world.x, world.x[torch.from_numpy(rows)]) and list(client_world.members) == [id]


@pytest.mark.parametrize("channel", [{}, {"quantise": True}], ids=["plain", "quantised"])
def test_a_stopped_run_goes_on_to_the_same_tensors(rows, tmp_path, monkeypatch, channel):
    """The server's checkpoint plants what clients have lost: local tensors, left-over rounding."""
    monkeypatch.setattr("fedvlm.runner.training.CHECKPOINT_SECONDS", 0.0)
    settings_table = {"method": {"name": "fedot", "rounds": 4}, "protocol": "own-test", "engine": "flower"}
    settings_table["channel"] = channel
    uninterrupted = execute(build(settings_table), tmp_path / "whole", embedded=rows)
    plain_round, calls = InProcessEngine.round, []

    def stop(self, number, tasks):
        calls.append(number)
        if calls == [0, 1, 2]:
            raise KeyboardInterrupt
        return plain_round(self, number, tasks)

    monkeypatch.setattr(InProcessEngine, "round", stop)
    with pytest.raises(KeyboardInterrupt):
        execute(build(settings_table), tmp_path / "stopped", embedded=rows)
    execute(build(settings_table), tmp_path / "stopped", embedded=rows)
    assert calls == [0, 1, 2, 2, 3]
    name = "trainings/0-all.safetensors"
    assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert uninterrupted.personalised("photo").local["skew"].abs().sum() > 0


class Faulty(InProcessEngine):
    """A grid that loses or damages replies on their way."""

    def __init__(self, world, spoil, **rules):
        super().__init__(world)
        self.__dict__.update(rules)
        pull = self.grid.pull_messages
        self.grid.pull_messages = lambda ids: [reply for reply in map(spoil, pull(ids)) if reply is not None]


def lose(node):
    def spoil(message):
        return None if message.metadata.src_node_id == node else message

    return spoil


def test_who_does_not_answer_in_time_is_left_out_and_named():
    world = toy_world(make("fedot", rounds=2))
    lines = []
    engine = Faulty(world, lose(1001), quorum=0.5, deadline=0.0)
    learn(world, engine, lines)
    assert len(lines) == 2
    for line in lines:
        assert list(line["missing"]) == ["client-1"] and "within 0 s" in line["missing"]["client-1"]
        assert sorted(line["clients"]) == ["client-0", "client-2", "client-3"]


def test_below_the_quorum_the_run_stops_and_says_who_is_missing():
    world = toy_world(make("fedot", rounds=2))
    with pytest.raises(FederationError, match="round 0: 3 of 4 clients answered, and 4 must") as e:
        learn(world, Faulty(world, lose(1002), quorum=0.8, deadline=0.0))
    assert "client-2: it did not answer" in str(e.value)


def test_a_client_that_was_left_out_goes_on_from_its_own_local_tensors():
    """Its lost round leaves no trace: the next starts from the version the server names."""
    world = toy_world(make("fedot", rounds=1, lr=0.05))
    engine = InProcessEngine(world)
    state, initial_local = initial_state(world)
    plan = Plan(("client-0",), ())
    first = run_rounds(world, engine, plan, state, initial_local, lambda state, line: None)
    again = run_rounds(world, engine, plan, state, initial_local, lambda state, line: None)
    assert tensors.max_relative_difference(first.local["client-0"], again.local["client-0"]) == 0


@pytest.mark.parametrize("place", ["body", "end", "words"])
def test_a_damaged_upload_is_rejected_naming_client_and_round(place):
    world = toy_world(make("fedavg", rounds=1))

    def spoil(message):
        record = message.content["parcel"]
        if message.metadata.src_node_id != 1001 or not from_records(message.content, "").arrays:
            return message
        data = bytearray(record["bytes"])
        if place == "body":
            data[-9] ^= 4
        elif place == "end":
            data = data[:-3]
        else:
            at = data.index(b'loss\\": ') + len(b'loss\\": ')
            data[at : at + 1] = b"7" if data[at : at + 1] != b"7" else b"8"
        record["bytes"] = bytes(data)
        return message

    engine = Faulty(world, spoil, quorum=0.5, deadline=5.0)
    learn(world, engine)
    with pytest.raises(FederationError, match="client client-1, round 0: the message"):
        learn(world, Faulty(world, spoil, deadline=5.0))


def test_a_reply_to_another_round_is_not_taken():
    world = toy_world(make("fedavg", rounds=2))
    old = []

    def replay(message):
        if message.metadata.src_node_id != 1000:
            return message
        old.append(message)
        message.content = old[0].content
        return message

    with pytest.raises(FederationError, match="client-0, round 1: the reply is to another"):
        learn(world, Faulty(world, replay, deadline=5.0))


def test_an_error_at_a_client_reaches_the_server_with_its_trace():
    world = toy_world(make("fedavg", rounds=1))
    engine = InProcessEngine(replace(world, y=world.y.float()))  # a client whose labels are no labels
    state, initial_local = initial_state(world)
    with pytest.raises(FederationError, match="client client-0, round 0 failed:\\nTraceback") as e:
        run_rounds(world, engine, Plan(("client-0",), ()), state, initial_local, lambda state, line: None)
    assert "cross_entropy" in str(e.value)


def test_parcels_keep_types_shapes_and_every_bit():
    arrays = {
        "scalar": np.array(3.5, np.float32),
        "none": np.zeros((0, 3), np.float16),
        "turned": np.arange(6).reshape(2, 3).T,
        "bits": np.array([True, False]),
    }
    message = seal(Message({"round": 3, "names": ("a", "ö")}, arrays))
    back = unseal(from_records(to_records(message), "here"), "here")
    assert back.header == message.header
    for name, array in arrays.items():
        assert back.arrays[name].dtype == array.dtype
        assert torch.equal(to_tensors(back.arrays)[name], torch.tensor(array))


def test_flower_is_imported_late_and_without_telemetry():
    code = (
        "import os, sys, fedvlm.runner.run, fedvlm.engines.flower.engine\n"
        "assert 'flwr' not in sys.modules\n"
        "from fedvlm.engines.flower import import_flower\n"
        "import_flower()\n"
        "from flwr.supercore import telemetry\n"
        "print(telemetry.FLWR_TELEMETRY_ENABLED, os.environ['FLWR_DISABLE_UPDATE_CHECK'])\n"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("FLWR")}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert out.stdout == "0 1\n", out.stderr
    script = "import flwr.app\nfrom fedvlm.engines.flower import import_flower\nimport_flower()\n"
    out = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert "set FLWR_TELEMETRY_ENABLED=0 before importing flwr" in out.stderr


def test_a_run_goes_on_with_a_third_of_the_clients_missing_in_each_round():
    world = toy_world(make("fedot", rounds=6), sizes=(30,) * 10)
    draw = torch.Generator().manual_seed(1)
    missing_ids = [set(torch.randperm(9, generator=draw)[:3].tolist()) for _ in range(7)]

    def spoil(message):
        number = int(message.metadata.group_id)
        return None if message.metadata.src_node_id - 1000 in missing_ids[number] else message

    lines = []
    outcome = learn(world, Faulty(world, spoil, quorum=0.6, deadline=0.0), lines)
    for line, missing in zip(lines, missing_ids, strict=False):
        assert sorted(line["missing"]) == [f"client-{number}" for number in sorted(missing)]
    assert outcome.shared["head"].isfinite().all() and len(outcome.scores) == 7


@pytest.mark.parametrize(
    "channel",
    [Channel(clip=0.05), Channel(clip=0.05, noise_multiplier=0.5), Channel(quantise=True)],
)
def test_the_channel_does_the_same_at_the_clients_as_in_one_process(channel):
    world = replace(toy_world(make("fedot", rounds=3, lr=1e-3)), channel=channel)
    plain, sent = [], []
    alone = learn(world, Sequential(world), plain)
    through = learn(world, InProcessEngine(world), sent)
    check_same(through, alone, 1e-5, "flower and single engines differ")
    for a, b in zip(plain, sent, strict=True):
        assert a.get("epsilon") == b.get("epsilon")
        assert [client["bytes_up"] for client in a["clients"].values()] == [
            client["bytes_up"] for client in b["clients"].values()
        ]
