"""Engines: who takes part, what is kept, and what an error says."""

import os
import signal
from dataclasses import dataclass, replace

import pytest
import torch

from fedvlm import tensors
from fedvlm.core import make
from fedvlm.engines import chunks
from fedvlm.engines import loop as rounds
from fedvlm.engines.batched import Batched
from fedvlm.engines.chunks import make_chunks
from fedvlm.engines.client import Task, make_client, minibatch_order
from fedvlm.engines.loop import draw_participants, finish_training, initial_state, run_rounds
from fedvlm.engines.state import Plan
from fedvlm.engines.workers import WorkerPool
from fedvlm.errors import FederationError
from fedvlm.methods.fedavg import FedAvg
from fedvlm.storage.large_tensors import ClientStateStore
from fedvlm.testing import check_same, toy_world, train_toy


@dataclass(frozen=True)
class Failing(FedAvg):
    """FedAvg that fails, or sends NaN, where the first row of a client says so."""

    how: str = "raise"

    def update(self, frozen, sent, local, client):
        bad = client.x[0, 0] > 50
        if self.how == "raise" and bool(bad):
            raise ValueError("the rows are odd")
        return {"head": torch.where(bad, torch.nan, sent["head"])}, local


def with_bad_client(how):
    world = toy_world(Failing(how=how, rounds=2))
    x = world.x.clone()
    x[world.members["client-2"].train[0]] = 99
    return replace(world, x=x)


@pytest.mark.parametrize(("engine", "workers"), [("single", 1), ("batched", 1), ("batched", 2)])
def test_an_error_names_method_client_and_round_and_shows_the_traceback(engine, workers):
    with pytest.raises(FederationError) as caught:
        train_toy(with_bad_client("raise"), engine, workers)
    text = str(caught.value)
    assert "method fedavg, client client-2, round 0" in text
    assert "ValueError: the rows are odd" in text
    assert 'raise ValueError("the rows are odd")' in text


@pytest.mark.parametrize("engine", ["single", "batched"])
def test_an_upload_with_nan_is_refused_and_named(engine):
    with pytest.raises(FederationError, match="client client-2, round 0: 64 of 64 numbers of 'head'"):
        train_toy(with_bad_client("nan"), engine)


def test_a_killed_worker_is_reported_and_not_waited_for():
    world = toy_world(make("fedavg"))
    state, initial_local = initial_state(world)
    tasks = [Task(id, state.shared, initial_local, True) for id in sorted(world.members)]
    pool = WorkerPool(world, 2)
    try:
        os.kill(pool.processes[0].pid, signal.SIGKILL)
        with pytest.raises(FederationError, match="worker process ended in round 0 .* resume"):
            pool.round(0, [[task] for task in tasks])
    finally:
        pool.close()
    assert not any(process.is_alive() for process in pool.processes)


def test_results_do_not_depend_on_processes_with_many_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "MAX_CLIENTS_PER_CHUNK", 1)
    world = toy_world(make("fedot", rounds=2, lr=1e-3))
    check_same(train_toy(world, workers=2), train_toy(world, workers=1), 0.0, "workers change the result")


def test_participants_are_a_fraction_drawn_by_seed_and_everyone_comes_in_time():
    world = toy_world(make("fedavg"))
    plan = Plan(tuple(world.members), (), fraction=0.5)
    draws = [draw_participants(world, plan, number) for number in range(20)]
    assert all(len(ids) == 2 for ids in draws)
    assert {id for ids in draws for id in ids} == set(world.members)
    assert draws == [draw_participants(world, plan, number) for number in range(20)]


def test_local_state_is_kept_by_id_and_only_changed_by_taking_part():
    world = toy_world(make("fedot", rounds=6, lr=1e-3))
    plan = Plan(tuple(sorted(world.members)), (), fraction=0.5)
    state, initial_local = initial_state(world)
    history = []
    engine = Batched(world, 1)
    run_rounds(world, engine, plan, state, initial_local, lambda state, line: history.append(state))
    for number, (before, after) in enumerate(zip([state, *history], history, strict=False)):
        ids = draw_participants(world, plan, number)
        for id in world.members:
            old, new = before.local.get(id, initial_local), after.local.get(id, initial_local)
            assert torch.equal(old["skew"], new["skew"]) == (id not in ids), (number, id)


def test_partial_participation_agrees_between_engines():
    world = toy_world(make("fedot", rounds=4, lr=1e-3))
    a, b = (train_toy(world, engine, fraction=0.4) for engine in ("single", "batched"))
    check_same(a, b, 1e-5, "engines differ")


def test_minibatches_hold_every_row_once_per_epoch():
    world = toy_world(make("fedavg", local_epochs=3, batch_size=8))
    order = minibatch_order(world, "client-2", 5)
    rows = order[order >= 0]
    assert torch.equal(rows.bincount(), torch.full((70,), 3))
    assert not torch.equal(order, minibatch_order(world, "client-2", 6))


def test_chunks_keep_clients_of_a_size_together_and_bound_the_padding(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ROW_BYTES", 70 * 16 * 4 * 2)
    world = toy_world(make("fedavg"))
    state, initial_local = initial_state(world)
    tasks = [Task(id, state.shared, initial_local, True) for id in world.members]
    actual = make_chunks(world, tasks)
    assert [[task.id for task in part] for part in actual] == [
        ["client-2", "client-0"],
        ["client-3", "client-1"],
    ]


def test_the_validation_round_is_kept_with_its_own_tensors():
    world = toy_world(make("fedavg", rounds=5, lr=0.3))  # too fast: it gets worse
    plan = Plan(tuple(sorted(world.members)), (), selection="validation")
    state, initial_local = initial_state(world)
    lines = []
    state = run_rounds(world, Batched(world, 1), plan, state, initial_local, lambda s, line: lines.append(line))
    done = rounds.finish_training(world, Batched(world, 1), plan, state, initial_local)
    scores = [line["validation"] for line in lines]
    accuracy = sum(s["validation_hits"] / s["validation_rows"] for s in done.scores.values()) / 4
    assert accuracy >= max(scores) - 1e-12
    if done.round < 5:
        assert accuracy == pytest.approx(scores[done.round])


def test_a_client_without_validation_rows_chooses_nothing_by_its_training_rows():
    world = toy_world(make("fedot", blocks="auto", rounds=2))
    bare = replace(world.members["client-0"], validation=world.members["client-0"].train[:0])
    world = replace(world, members={**world.members, "client-0": bare})
    assert make_client(world, "client-0", 0).val_x.shape[0] == 0
    done = train_toy(world)
    assert done.scores["client-0"]["validation_rows"] == 40
    assert done.descriptions["client-0"]["blocks"] == 1  # nothing to choose by


@pytest.mark.parametrize("name", ["fedavg", "fedot", "tofa", "scaffold"])
def test_uploads_summed_as_they_come_are_aggregated_as_together(name, tmp_path, monkeypatch):
    """By rows, by clients, as totals; a method that looks at single ones gets them."""
    options = {"tofa": {"min_class_samples": 1}}.get(name, {"rounds": 3})
    world = toy_world(make(name, **options))
    at_once = train_toy(world)
    plan = Plan(tuple(world.members)[:-1], tuple(world.members)[-1:])
    state, initial_local = initial_state(world)
    state = replace(state, local=ClientStateStore(tmp_path / "local", plan.train, initial_local))
    monkeypatch.setattr(rounds, "CLIENTS_PER_PART", 2)
    engine = Batched(world, 1)
    lines = []
    state = run_rounds(world, engine, plan, state, initial_local, lambda state, line: lines.append(line))
    parts = finish_training(world, engine, plan, state, initial_local)
    assert tensors.max_relative_difference(parts.shared, at_once.shared) < 1e-6
    assert sorted(parts.local) == sorted(at_once.local)
    for id, expected_local in at_once.local.items():
        assert tensors.max_relative_difference(parts.local[id], expected_local) < 1e-5
    assert parts.scores.keys() == at_once.scores.keys()
    assert all(lines[0]["clients"][id]["bytes_up"] for id in plan.train)
