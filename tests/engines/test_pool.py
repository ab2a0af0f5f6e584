"""What goes to worker processes and back comes out as it went in, however it travels."""

from mmap import mmap
from multiprocessing import Pipe

import pytest
import torch

from fedvlm.core import make
from fedvlm.engines import pool
from fedvlm.engines.pool import Line
from fedvlm.testing import check_same, learn, toy_world

TENSORS = {
    "floats": torch.linspace(0, 1, 11).reshape(11, 1),
    "whole": torch.arange(5, dtype=torch.int32),
    "turned": torch.arange(6.0).reshape(2, 3).mT,
    "scalar": torch.tensor(7.5, dtype=torch.float64),
    "none": torch.zeros(3, 0),
    "truth": torch.tensor([True, False, True]),
}


def lines():
    ours, theirs = Pipe()
    room = mmap(-1, pool.ROOM)
    return Line(ours, room), Line(theirs, room)


@pytest.mark.parametrize("room", [0, 100, 1 << 20])
def test_tensors_arrive_as_they_left_in_memory_that_is_shared_or_by_the_pipe(room, monkeypatch):
    ours, theirs = lines()
    monkeypatch.setattr(pool, "ROOM", room)
    for _ in range(3):  # a room is used again and again
        ours.give(ours.put(TENSORS))
        came = theirs.get(theirs.take())
        assert came.keys() == TENSORS.keys()
        for key, value in TENSORS.items():
            assert came[key].dtype == value.dtype and torch.equal(came[key], value)


def test_what_came_stays_when_the_room_is_used_again():
    ours, theirs = lines()
    ours.give(ours.put({"a": torch.ones(4)}))
    first = theirs.get(theirs.take())["a"]
    theirs.give(theirs.put({"b": torch.zeros(9)}))
    assert torch.equal(first, torch.ones(4))


def test_what_several_clients_have_travels_once():
    ours, theirs = lines()
    same = torch.ones(1000)
    ours.give([ours.put({"a": same}), ours.put({"b": same})])
    one, other = map(theirs.get, theirs.take())
    assert one["a"] is other["b"]
    first, second = {"a": same}, {"a": torch.ones(1000)}
    given = [ours.new(sent) is None for sent in (first, dict(first), second, first, first)]
    assert given == [False, True, False, False, True]


def test_tensors_that_are_gone_once_they_are_put_are_not_taken_for_one_another():
    ours, theirs = lines()
    ours.give([ours.put({"a": torch.full((1000,), float(i))}) for i in range(20)])
    assert [float(theirs.get(one)["a"][0]) for one in theirs.take()] == list(range(20))


def test_the_size_of_the_room_changes_no_bit(monkeypatch):
    world = toy_world(make("tofa"))
    reference = learn(world)
    monkeypatch.setattr(pool, "ROOM", 1 << 10)
    check_same(learn(world, workers=2), reference, 0.0, "the room changes the result")
