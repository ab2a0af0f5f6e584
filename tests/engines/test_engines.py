"""Engines: who takes part, what is kept, and what an error says."""

import os
import signal
from dataclasses import dataclass, replace

import pytest
import torch

from fedvlm import tensors
from fedvlm.core import make
from fedvlm.engines import batched
from fedvlm.engines import loop as rounds
from fedvlm.engines.batched import Batched, chunks
from fedvlm.engines.client import Task, client, minibatches
from fedvlm.engines.loop import finish, participants, start, train
from fedvlm.engines.pool import Pool
from fedvlm.engines.state import Plan
from fedvlm.errors import FederationError
from fedvlm.methods.fedavg import FedAvg
from fedvlm.storage.shelf import Shelf
from fedvlm.testing import check_same, learn, toy_world


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
        learn(with_bad_client("raise"), engine, workers)
    text = str(caught.value)
    assert "method fedavg, client client-2, round 0" in text
    assert "ValueError: the rows are odd" in text
    assert 'raise ValueError("the rows are odd")' in text


@pytest.mark.parametrize("engine", ["single", "batched"])
def test_an_upload_with_nan_is_refused_and_named(engine):
    with pytest.raises(
        FederationError, match="client client-2, round 0: 64 of 64 numbers of 'head'"
    ):
        learn(with_bad_client("nan"), engine)


def test_a_killed_worker_is_reported_and_not_waited_for():
    world = toy_world(make("fedavg"))
    state, fresh = start(world)
    tasks = [Task(id, state.shared, fresh, True) for id in sorted(world.members)]
    pool = Pool(world, 2)
    try:
        os.kill(pool.processes[0].pid, signal.SIGKILL)
        with pytest.raises(FederationError, match="worker process ended in round 0 .* resume"):
            pool.round(0, [[task] for task in tasks])
    finally:
        pool.close()
    assert not any(process.is_alive() for process in pool.processes)


def test_results_do_not_depend_on_processes_with_many_chunks(monkeypatch):
    monkeypatch.setattr(batched, "MOST", 1)
    world = toy_world(make("fedot", rounds=2, lr=1e-3))
    check_same(learn(world, workers=2), learn(world, workers=1), 0.0, "workers change the result")


def test_participants_are_a_fraction_drawn_by_seed_and_everyone_comes_in_time():
    world = toy_world(make("fedavg"))
    plan = Plan(tuple(world.members), (), fraction=0.5)
    seen = [participants(world, plan, number) for number in range(20)]
    assert all(len(ids) == 2 for ids in seen)
    assert {id for ids in seen for id in ids} == set(world.members)
    assert seen == [participants(world, plan, number) for number in range(20)]


def test_local_state_is_kept_by_id_and_only_changed_by_taking_part():
    world = toy_world(make("fedot", rounds=6, lr=1e-3))
    plan = Plan(tuple(sorted(world.members)), (), fraction=0.5)
    state, fresh = start(world)
    history = []
    engine = Batched(world, 1)
    train(world, engine, plan, state, fresh, lambda state, line: history.append(state))
    for number, (before, after) in enumerate(zip([state, *history], history, strict=False)):
        ids = participants(world, plan, number)
        for id in world.members:
            old, new = before.local.get(id, fresh), after.local.get(id, fresh)
            assert torch.equal(old["skew"], new["skew"]) == (id not in ids), (number, id)


def test_partial_participation_agrees_between_engines():
    world = toy_world(make("fedot", rounds=4, lr=1e-3))
    a, b = (learn(world, engine, fraction=0.4) for engine in ("single", "batched"))
    check_same(a, b, 1e-5, "engines differ")


def test_minibatches_hold_every_row_once_per_epoch():
    world = toy_world(make("fedavg", local_epochs=3, batch_size=8))
    order = minibatches(world, "client-2", 5)
    rows = order[order >= 0]
    assert torch.equal(rows.bincount(), torch.full((70,), 3))
    assert not torch.equal(order, minibatches(world, "client-2", 6))


def test_chunks_keep_clients_of_a_size_together_and_bound_the_padding(monkeypatch):
    monkeypatch.setattr(batched, "ROW_BYTES", 70 * 16 * 4 * 2)
    world = toy_world(make("fedavg"))
    state, fresh = start(world)
    tasks = [Task(id, state.shared, fresh, True) for id in world.members]
    found = chunks(world, tasks)
    assert [[task.id for task in part] for part in found] == [
        ["client-2", "client-0"],
        ["client-3", "client-1"],
    ]


def test_the_validation_round_is_kept_with_its_own_tensors():
    world = toy_world(make("fedavg", rounds=5, lr=0.3))  # too fast: it gets worse
    plan = Plan(tuple(sorted(world.members)), (), selection="validation")
    state, fresh = start(world)
    lines = []
    state = train(world, Batched(world, 1), plan, state, fresh, lambda s, line: lines.append(line))
    done = rounds.finish(world, Batched(world, 1), plan, state, fresh)
    scores = [line["validation"] for line in lines]
    mine = sum(s["validation_hits"] / s["validation_rows"] for s in done.scores.values()) / 4
    assert mine >= max(scores) - 1e-12
    if done.round < 5:
        assert mine == pytest.approx(scores[done.round])


def test_a_client_without_validation_rows_chooses_nothing_by_its_training_rows():
    world = toy_world(make("fedot", blocks="auto", rounds=2))
    bare = replace(world.members["client-0"], validation=world.members["client-0"].train[:0])
    world = replace(world, members={**world.members, "client-0": bare})
    assert client(world, "client-0", 0).held_x.shape[0] == 0
    done = learn(world)
    assert done.scores["client-0"]["validation_rows"] == 40
    assert done.maps["client-0"]["blocks"] == 1  # nothing to choose by


@pytest.mark.parametrize("name", ["fedavg", "fedot", "tofa", "scaffold"])
def test_uploads_summed_as_they_come_are_aggregated_as_together(name, tmp_path, monkeypatch):
    """By rows, by clients, as totals; a method that looks at single ones gets them."""
    options = {"tofa": {"min_class_samples": 1}}.get(name, {"rounds": 3})
    world = toy_world(make(name, **options))
    together = learn(world)
    plan = Plan(tuple(world.members)[:-1], tuple(world.members)[-1:])
    state, fresh = start(world)
    state = replace(state, local=Shelf(tmp_path / "local", plan.train, fresh))
    monkeypatch.setattr(rounds, "PART", 2)
    engine = Batched(world, 1)
    lines = []
    state = train(world, engine, plan, state, fresh, lambda state, line: lines.append(line))
    parts = finish(world, engine, plan, state, fresh)
    assert tensors.difference(parts.shared, together.shared) < 1e-6
    assert sorted(parts.local) == sorted(together.local)
    for id, own in together.local.items():
        assert tensors.difference(parts.local[id], own) < 1e-5
    assert parts.scores.keys() == together.scores.keys()
    assert all(lines[0]["clients"][id]["bytes_up"] for id in plan.train)
