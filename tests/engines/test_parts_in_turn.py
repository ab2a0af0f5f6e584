"""Parts of a large federation: the next is under way while the last is looked at."""

from dataclasses import replace
from threading import Event
from time import sleep

import pytest
import torch

from fedvlm.core import make
from fedvlm.engines import chunks, loop, workers
from fedvlm.engines.batched import Batched, run_parts
from fedvlm.engines.client import Task
from fedvlm.engines.sequential import Sequential
from fedvlm.errors import FederationError, SettingsError
from fedvlm.testing import check_same, toy_world, train_toy

SIZES = (40, 9, 70, 33, 25, 12, 31, 8)


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(chunks, "MAX_CLIENTS_PER_CHUNK", 1)  # so that few clients are several chunks
    return toy_world(make("tofa"), SIZES)


def parts_of(world, size=3):
    state, initial_local = loop.initial_state(world)
    tasks = [Task(id, state.shared, initial_local, True) for id in world.members]
    return [tasks[first : first + size] for first in range(0, len(tasks), size)]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("last", [False, True])
def test_every_part_comes_in_its_turn_with_the_answers_of_one_client_at_a_time(world, workers, last):
    parts, plain = parts_of(world), Sequential(world)
    engine = Batched(world, workers)
    if last:
        engine.round(0, parts[0])  # forks
    turns = list(run_parts(engine, 0, parts, last))
    engine.close()
    assert [tasks for tasks, _ in turns] == parts
    for tasks, answers in turns:
        expected = (plain.adapt if last else plain.round)(0, tasks).replies
        assert answers.replies.keys() == expected.keys()
        for id, reply in expected.items():
            for key, value in (reply.local if last else reply.upload).items():
                actual = answers.replies[id].local if last else answers.replies[id].upload
                torch.testing.assert_close(actual[key], value)


def test_the_next_part_is_asked_for_before_the_last_is_done_with(world, monkeypatch):
    requested = {id: Event() for id in world.members}
    plain = Batched.round

    def noting(self, number, tasks):
        for task in tasks:
            requested[task.id].set()
        return plain(self, number, tasks)

    monkeypatch.setattr(Batched, "round", noting)
    engine, parts = Batched(world, 2), parts_of(world)
    for place, _ in enumerate(run_parts(engine, 0, parts)):
        if place + 1 < len(parts):
            assert requested[parts[place + 1][0].id].wait(60)
        if place + 2 < len(parts):
            assert not requested[parts[place + 2][0].id].is_set()  # one part ahead, no more
    engine.close()


def test_without_worker_processes_nothing_is_done_beside_the_caller(world, monkeypatch):
    engine, parts = Batched(world, 1), parts_of(world)
    requested = []
    monkeypatch.setattr(engine, "round", lambda number, tasks: requested.append(tasks))
    for place, _ in enumerate(run_parts(engine, 0, parts)):
        assert len(requested) == place + 1


def test_a_caller_that_fails_does_not_wait_for_the_part_that_is_under_way(world, monkeypatch):
    original = workers.run_chunk
    parts = parts_of(world)
    first = {task.id for task in parts[0]}

    def slow(world, number, tasks):
        if tasks[0].id not in first:
            sleep(600)
        return original(world, number, tasks)

    monkeypatch.setattr(workers, "run_chunk", slow)
    engine = Batched(world, 2)

    def failing():
        for _ in run_parts(engine, 0, parts):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        failing()
    for process in engine.pool.processes:
        process.kill()  # else closing waits for five seconds
    engine.close()


def test_an_error_of_a_worker_is_said_in_its_part_and_ends_the_round(world, monkeypatch):
    good = parts_of(world)[1][0].id
    small = replace(world, method=replace(world.method, max_samples=60))
    engine = Batched(small, 2)
    turns = run_parts(engine, 0, [parts_of(small)[1], parts_of(small)[0]])
    assert good in next(turns)[1].replies
    with pytest.raises(SettingsError, match="70 samples; set max_samples = 70"):
        next(turns)
    with pytest.raises(FederationError, match="given up"):
        engine.round(1, parts_of(small)[1])
    engine.close()


def test_a_large_federation_has_the_same_bits_for_any_number_of_workers(world, monkeypatch):
    monkeypatch.setattr(loop, "CLIENTS_PER_PART", 3)
    monkeypatch.setattr(loop, "LARGE_ROUND_BYTES", 0)
    reference = train_toy(world, workers=1)
    check_same(train_toy(world, workers=2), reference, 0.0, "workers change the result")
