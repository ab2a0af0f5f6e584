"""What goes to worker processes and back comes out as it went in, however it travels."""

from mmap import mmap
from multiprocessing import Pipe

import pytest
import torch

from fedvlm.core import make
from fedvlm.engines import workers
from fedvlm.engines.workers import WorkerConnection
from fedvlm.testing import check_same, toy_world, train_toy

TENSORS = {
    "floats": torch.linspace(0, 1, 11).reshape(11, 1),
    "whole": torch.arange(5, dtype=torch.int32),
    "turned": torch.arange(6.0).reshape(2, 3).mT,
    "scalar": torch.tensor(7.5, dtype=torch.float64),
    "none": torch.zeros(3, 0),
    "truth": torch.tensor([True, False, True]),
}


def lines():
    parent, theirs = Pipe()
    room = mmap(-1, workers.SHARED_MEMORY_BYTES)
    return WorkerConnection(parent, room), WorkerConnection(theirs, room)


@pytest.mark.parametrize("room", [0, 100, 1 << 20])
def test_tensors_arrive_as_they_left_in_memory_that_is_shared_or_by_the_pipe(room, monkeypatch):
    parent, theirs = lines()
    monkeypatch.setattr(workers, "SHARED_MEMORY_BYTES", room)
    for _ in range(3):  # a room is used again and again
        parent.send(parent.put(TENSORS))
        arrived_tensors = theirs.get(theirs.receive())
        assert arrived_tensors.keys() == TENSORS.keys()
        for key, value in TENSORS.items():
            assert arrived_tensors[key].dtype == value.dtype and torch.equal(arrived_tensors[key], value)


def test_what_came_stays_when_the_room_is_used_again():
    parent, theirs = lines()
    parent.send(parent.put({"a": torch.ones(4)}))
    first = theirs.get(theirs.receive())["a"]
    theirs.send(theirs.put({"b": torch.zeros(9)}))
    assert torch.equal(first, torch.ones(4))


def test_what_several_clients_have_travels_once():
    parent, theirs = lines()
    same = torch.ones(1000)
    parent.send([parent.put({"a": same}), parent.put({"b": same})])
    first_copy, second_copy = map(theirs.get, theirs.receive())
    assert first_copy["a"] is second_copy["b"]
    first, second = {"a": same}, {"a": torch.ones(1000)}
    is_repeated = [parent.put_if_new(sent) is None for sent in (first, dict(first), second, first, first)]
    assert is_repeated == [False, True, False, False, True]


def test_tensors_that_are_gone_once_they_are_put_are_not_taken_for_one_another():
    parent, theirs = lines()
    parent.send([parent.put({"a": torch.full((1000,), float(i))}) for i in range(20)])
    assert [float(theirs.get(place)["a"][0]) for place in theirs.receive()] == list(range(20))


def test_the_size_of_the_room_changes_no_bit(monkeypatch):
    world = toy_world(make("tofa"))
    reference = train_toy(world)
    monkeypatch.setattr(workers, "SHARED_MEMORY_BYTES", 1 << 10)
    check_same(train_toy(world, workers=2), reference, 0.0, "the room changes the result")
