"""Clients that leave, or are late, in the middle of a secure sum of Flower's SecAgg+."""

from dataclasses import replace

import pytest

from fedvlm.channel import Channel
from fedvlm.core import make
from fedvlm.engines.flower.engine import InProcessEngine
from fedvlm.engines.flower.secure import STAGE
from fedvlm.engines.loop import initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan
from fedvlm.errors import FederationError
from fedvlm.tensors import max_relative_difference
from fedvlm.testing import toy_world

SECURE = Channel(clip=0.5, secure=True)
STAGES = ["setup", "share_keys", "collect_masked_vectors", "unmask"]


def world_of(count=5, rounds=1):
    world = toy_world(make("fedavg", rounds=rounds, lr=0.01), sizes=(30,) * count)
    return replace(world, channel=SECURE)


def learnt(world, engine):
    plan = Plan(tuple(sorted(world.members)), ())
    state, initial_local = initial_state(world)
    lines = []
    state = run_rounds(world, engine, plan, state, initial_local, lambda state, line: lines.append(line))
    return state, lines


def plain(world, *left_ids):
    """What the clients that stay give without a secure sum."""
    members = {id: member for id, member in world.members.items() if id not in left_ids}
    remaining = replace(world, members=members, channel=replace(SECURE, secure=False))
    return learnt(remaining, Sequential(remaining))[0]


class LeavingEngine(InProcessEngine):
    """From a stage of a round on, replies of some clients no longer come, or come too late."""

    def __init__(self, world, left_ids, stage, number=0):
        super().__init__(world)
        self.quorum, self.deadline = 0.5, 0.0
        self.asked = []  # stages of every message, in their order
        push, pull, dropped_ids = self.grid.push_messages, self.grid.pull_messages, set()
        nodes = {self.nodes[id] for id in left_ids}

        def lost(message):
            if STAGE not in message.content.config_records:
                return False
            about, now = message.metadata, message.content[STAGE]["stage"]
            self.asked.append(now)
            is_lost = about.group_id == str(number) and STAGES.index(now) >= STAGES.index(stage)
            return is_lost and about.dst_node_id in nodes

        def pushed(messages):
            messages = list(messages)
            some = [lost(message) for message in messages]
            ids = push(messages)
            dropped_ids.clear()
            dropped_ids.update(id for id, message in zip(ids, some, strict=True) if message)
            return ids

        def pulled(ids):
            return [reply for reply in pull(ids) if reply.metadata.reply_to_message_id not in dropped_ids]

        self.grid.push_messages, self.grid.pull_messages = pushed, pulled


@pytest.mark.parametrize("stage", STAGES[:2])
@pytest.mark.parametrize("count", [4, 5, 10])
def test_who_leaves_before_it_has_masked_is_named_and_the_others_begin_again(stage, count):
    """Flower 1.41 goes on without its key and fails at the end, after all have uploaded."""
    world = world_of(count)
    engine = LeavingEngine(world, ["client-1"], stage)
    after, [line] = learnt(world, engine)
    assert list(line["missing"]) == ["client-1"]
    assert "did not stay to the end of the sum" in line["missing"]["client-1"]
    assert max_relative_difference(after.shared, plain(world, "client-1").shared) < 1e-6
    assert engine.asked.count("setup") == 2 * count - 1
    assert engine.asked.count("collect_masked_vectors") == count - 1  # nobody uploads twice


@pytest.mark.parametrize("count", [4, 5, 10, pytest.param(30, marks=pytest.mark.slow)])
def test_who_leaves_with_its_masked_upload_is_named_and_its_masks_are_lifted(count):
    world = world_of(count)
    after, [line] = learnt(world, LeavingEngine(world, ["client-1"], "collect_masked_vectors"))
    assert list(line["missing"]) == ["client-1"]
    assert "did not stay to the end of the sum" in line["missing"]["client-1"]
    assert max_relative_difference(after.shared, plain(world, "client-1").shared) < 1e-6


@pytest.mark.parametrize("count", [3, 4, 5, 10, pytest.param(30, marks=pytest.mark.slow)])
def test_who_leaves_after_its_masked_upload_came_is_in_the_sum(count):
    world = world_of(count)
    after, [line] = learnt(world, LeavingEngine(world, ["client-1"], "unmask"))
    assert "missing" not in line
    assert max_relative_difference(after.shared, plain(world).shared) < 1e-6


def test_a_third_of_ten_may_leave_after_masking():
    world = world_of(10)
    left_ids = ["client-1", "client-4", "client-8"]
    after, [line] = learnt(world, LeavingEngine(world, left_ids, "collect_masked_vectors"))
    assert sorted(line["missing"]) == left_ids
    assert max_relative_difference(after.shared, plain(world, *left_ids).shared) < 1e-6


@pytest.mark.parametrize("stage", STAGES[2:])
def test_when_too_few_stay_to_lift_the_masks_the_round_is_refused_and_says_who_left(stage):
    world = world_of(5)
    with pytest.raises(FederationError, match="0 of 5 clients answered") as error:
        learnt(world, LeavingEngine(world, ["client-1", "client-2", "client-3"], stage))
    error_text = str(error.value)
    for id in ("client-1", "client-2", "client-3"):
        assert f"client {id}, round 0: it did not stay to the end of the sum" in error_text
    for id in ("client-0", "client-4"):
        assert f"client {id}, round 0: it stayed, but too few others did" in error_text


def test_masks_are_not_lifted_from_a_sum_of_two():
    """Either of two knows the other's upload, and a server can claim that the third has left."""
    world = world_of(3)
    with pytest.raises(FederationError, match="at least 3 uploads, got 2") as error:
        learnt(world, LeavingEngine(world, ["client-1"], "collect_masked_vectors"))
    assert "client client-1, round 0: it did not stay to the end of the sum" in str(error.value)


def test_two_that_are_left_do_not_begin_a_sum():
    world = world_of(3)
    engine = LeavingEngine(world, ["client-1"], "setup")
    with pytest.raises(FederationError, match="client-1, round 0: it did not stay"):
        learnt(world, engine)
    assert engine.asked == ["setup"] * 3


def test_a_round_that_was_refused_is_repeated_and_gives_what_it_would_have_given():
    """The server keeps the state before it; the masks of the second time are others."""
    world = world_of(4, rounds=2)
    engine = LeavingEngine(world, ["client-1", "client-2"], "unmask", number=1)
    plan = Plan(tuple(sorted(world.members)), ())
    state, initial_local = initial_state(world)
    states = []
    with pytest.raises(FederationError, match="too few others did"):
        run_rounds(world, engine, plan, state, initial_local, lambda state, line: states.append(state))
    again = InProcessEngine(world)
    after = run_rounds(world, again, plan, states[-1], initial_local, lambda state, line: None)
    assert len(states) == 1
    assert max_relative_difference(after.shared, plain(world).shared) < 1e-6


def test_a_client_that_left_one_secure_round_is_in_the_next():
    world = world_of(4, rounds=3)
    _, lines = learnt(world, LeavingEngine(world, ["client-2"], "collect_masked_vectors", number=1))
    assert [sorted(line.get("missing", {})) for line in lines] == [[], ["client-2"], []]
