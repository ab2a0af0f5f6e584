"""Clients that leave, or are late, in the middle of a secure sum of Flower's SecAgg+."""

from dataclasses import replace

import pytest

from fedvlm.channel import Channel
from fedvlm.core import make
from fedvlm.engines.flower.local import InProcess
from fedvlm.engines.flower.secure import STAGE
from fedvlm.engines.loop import start, train
from fedvlm.engines.single import Single
from fedvlm.engines.state import Plan
from fedvlm.errors import FederationError
from fedvlm.tensors import difference
from fedvlm.testing import toy_world

SECURE = Channel(clip=0.5, secure=True)
STAGES = ["setup", "share_keys", "collect_masked_vectors", "unmask"]


def world_of(count=5, rounds=1):
    world = toy_world(make("fedavg", rounds=rounds, lr=0.01), sizes=(30,) * count)
    return replace(world, channel=SECURE)


def learnt(world, engine):
    plan = Plan(tuple(sorted(world.members)), ())
    state, fresh = start(world)
    lines = []
    state = train(world, engine, plan, state, fresh, lambda state, line: lines.append(line))
    return state, lines


def plain(world, *gone):
    """What the clients that stay give without a secure sum."""
    members = {id: one for id, one in world.members.items() if id not in gone}
    others = replace(world, members=members, channel=replace(SECURE, secure=False))
    return learnt(others, Single(others))[0]


class Leaving(InProcess):
    """From a stage of a round on, replies of some clients no longer come, or come too late."""

    def __init__(self, world, gone, stage, number=0):
        super().__init__(world)
        self.quorum, self.deadline = 0.5, 0.0
        self.asked = []  # stages of every message, in their order
        push, pull, late = self.grid.push_messages, self.grid.pull_messages, set()
        nodes = {self.nodes[id] for id in gone}

        def lost(message):
            if STAGE not in message.content.config_records:
                return False
            about, now = message.metadata, message.content[STAGE]["stage"]
            self.asked.append(now)
            here = about.group_id == str(number) and STAGES.index(now) >= STAGES.index(stage)
            return here and about.dst_node_id in nodes

        def pushed(messages):
            messages = list(messages)
            some = [lost(one) for one in messages]
            ids = push(messages)
            late.clear()
            late.update(id for id, one in zip(ids, some, strict=True) if one)
            return ids

        def pulled(ids):
            return [one for one in pull(ids) if one.metadata.reply_to_message_id not in late]

        self.grid.push_messages, self.grid.pull_messages = pushed, pulled


@pytest.mark.parametrize("stage", STAGES[:2])
@pytest.mark.parametrize("count", [4, 5, 10])
def test_who_leaves_before_it_has_masked_is_named_and_the_others_begin_again(stage, count):
    """Flower 1.41 goes on without its key and fails at the end, after all have uploaded."""
    world = world_of(count)
    engine = Leaving(world, ["client-1"], stage)
    after, [line] = learnt(world, engine)
    assert list(line["missing"]) == ["client-1"]
    assert "did not stay to the end of the sum" in line["missing"]["client-1"]
    assert difference(after.shared, plain(world, "client-1").shared) < 1e-6
    assert engine.asked.count("setup") == 2 * count - 1
    assert engine.asked.count("collect_masked_vectors") == count - 1  # nobody uploads twice


@pytest.mark.parametrize("count", [4, 5, 10, 30])
def test_who_leaves_with_its_masked_upload_is_named_and_its_masks_are_lifted(count):
    world = world_of(count)
    after, [line] = learnt(world, Leaving(world, ["client-1"], "collect_masked_vectors"))
    assert list(line["missing"]) == ["client-1"]
    assert "did not stay to the end of the sum" in line["missing"]["client-1"]
    assert difference(after.shared, plain(world, "client-1").shared) < 1e-6


@pytest.mark.parametrize("count", [3, 4, 5, 10, 30])
def test_who_leaves_after_its_masked_upload_came_is_in_the_sum(count):
    world = world_of(count)
    after, [line] = learnt(world, Leaving(world, ["client-1"], "unmask"))
    assert "missing" not in line
    assert difference(after.shared, plain(world).shared) < 1e-6


def test_a_third_of_ten_may_leave_after_masking():
    world = world_of(10)
    gone = ["client-1", "client-4", "client-8"]
    after, [line] = learnt(world, Leaving(world, gone, "collect_masked_vectors"))
    assert sorted(line["missing"]) == gone
    assert difference(after.shared, plain(world, *gone).shared) < 1e-6


@pytest.mark.parametrize("stage", STAGES[2:])
def test_when_too_few_stay_to_lift_the_masks_the_round_is_refused_and_says_who_left(stage):
    world = world_of(5)
    with pytest.raises(FederationError, match="0 of 5 clients answered") as error:
        learnt(world, Leaving(world, ["client-1", "client-2", "client-3"], stage))
    said = str(error.value)
    for id in ("client-1", "client-2", "client-3"):
        assert f"client {id}, round 0: it did not stay to the end of the sum" in said
    for id in ("client-0", "client-4"):
        assert f"client {id}, round 0: it stayed, but too few others did" in said


def test_masks_are_not_lifted_from_a_sum_of_two():
    """Either of two knows the other's upload, and a server can claim that the third has left."""
    world = world_of(3)
    with pytest.raises(FederationError, match="at least 3 uploads, got 2") as error:
        learnt(world, Leaving(world, ["client-1"], "collect_masked_vectors"))
    assert "client client-1, round 0: it did not stay to the end of the sum" in str(error.value)


def test_two_that_are_left_do_not_begin_a_sum():
    world = world_of(3)
    engine = Leaving(world, ["client-1"], "setup")
    with pytest.raises(FederationError, match="client-1, round 0: it did not stay"):
        learnt(world, engine)
    assert engine.asked == ["setup"] * 3


def test_a_round_that_was_refused_is_repeated_and_gives_what_it_would_have_given():
    """The server keeps the state before it; the masks of the second time are others."""
    world = world_of(4, rounds=2)
    engine = Leaving(world, ["client-1", "client-2"], "unmask", number=1)
    plan = Plan(tuple(sorted(world.members)), ())
    state, fresh = start(world)
    kept = []
    with pytest.raises(FederationError, match="too few others did"):
        train(world, engine, plan, state, fresh, lambda state, line: kept.append(state))
    again = InProcess(world)
    after = train(world, again, plan, kept[-1], fresh, lambda state, line: None)
    assert len(kept) == 1
    assert difference(after.shared, plain(world).shared) < 1e-6


def test_a_client_that_left_one_secure_round_is_in_the_next():
    world = world_of(4, rounds=3)
    _, lines = learnt(world, Leaving(world, ["client-2"], "collect_masked_vectors", number=1))
    assert [sorted(line.get("missing", {})) for line in lines] == [[], ["client-2"], []]
