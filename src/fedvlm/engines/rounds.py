"""The loop over rounds: choose participants, send, update, aggregate, and keep the chosen state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal, Protocol

import torch

from fedvlm import seeds, tensors
from fedvlm.channel import validate
from fedvlm.core import Tensors
from fedvlm.engines.batched import Batched
from fedvlm.engines.single import Single, where
from fedvlm.engines.work import Done, Scores, Task, World, minibatches
from fedvlm.errors import SettingsError
from fedvlm.evaluate import accuracy, metric
from fedvlm.maths.conflict import difference_bound, largest_difference, mean_cosine
from fedvlm.metrics import METRICS

Selection = Literal["last", "validation", "oracle"]


class Engine(Protocol):
    def round(self, number: int, tasks: Sequence[Task]) -> dict[str, Done]:
        """Everyone is measured with what it was sent; those that train then do."""
        ...

    def adapt(self, number: int, tasks: Sequence[Task]) -> dict[str, Done]:
        """The adaptation after the rounds; everyone is measured with what came of it."""
        ...

    def close(self) -> None: ...


def open_engine(name: str, world: World, workers: int, rounds: int) -> Engine:
    if name == "single":
        return Single(world)
    return Batched(world, workers, rounds)


@dataclass(frozen=True)
class Plan:
    """Who trains, who is only measured, and which round's state is kept."""

    train: tuple[str, ...]
    unseen: tuple[str, ...]
    fraction: float = 1.0  # of the training clients in each round
    selection: Selection = "last"


@dataclass(frozen=True)
class State:
    """All that a training has learnt; what is not in here is derived from the settings."""

    round: int  # rounds done
    shared: Tensors
    local: Mapping[str, Tensors]  # by client id, for clients that have taken part
    best: float = -1.0  # the chosen round's score
    best_round: int = 0
    best_shared: Tensors | None = None  # None: the current state is the chosen one
    best_local: Mapping[str, Tensors] | None = None


def start(world: World) -> tuple[State, Tensors]:
    """The state before the first round, and the local tensors of a client nobody has seen."""
    shared, local = world.method.init(world.frozen)
    if both := shared.keys() & local.keys():
        raise SettingsError(
            f"method {world.method.name}: {min(both)!r} is both shared and local; rename one"
        )
    return State(0, tensors.copy(shared), {}), tensors.copy(local)


def participants(world: World, plan: Plan, number: int) -> list[str]:
    """At least one client, drawn by seed; all of them for a fraction of 1."""
    ids = sorted(plan.train)
    count = max(1, round(plan.fraction * len(ids)))
    if count == len(ids):
        return ids
    generator = seeds.generator("participants", world.seed, number)
    return sorted(ids[i] for i in torch.randperm(len(ids), generator=generator)[:count].tolist())


def train(
    world: World,
    engine: Engine,
    plan: Plan,
    state: State,
    fresh: Tensors,
    on_round: Callable[[State, dict[str, Any]], None],
) -> State:
    """Runs the rounds that are left; `on_round` gets each new state with the line to record."""
    method = world.method
    for number in range(state.round, method.rounds):
        begin = perf_counter()
        ids = participants(world, plan, number)
        # A round is chosen by what all clients make of it; else only participants are measured.
        known = ids if plan.selection == "last" else sorted(plan.train)
        tasks = [
            Task(id, method.send(state.shared, id), state.local.get(id, fresh), id in ids)
            for id in (*known, *sorted(plan.unseen))
        ]
        done = engine.round(number, tasks)
        uploads = [done[id].upload or {} for id in ids]
        for id, upload in zip(ids, uploads, strict=True):
            validate(upload, fresh.keys(), where(world, number, id))
        scores = {id: one.scores for id, one in done.items()}
        state = choose(plan, state, scores)
        line: dict[str, Any] = {"round": number, **means(plan, scores)}
        line |= disagreement(world, ids, state.shared, uploads, [done[id].local for id in ids])
        line["clients"] = {task.id: _line(task, done[task.id]) for task in tasks}
        shared = state.shared
        if uploads[0]:
            weights = torch.tensor([float(len(world.members[id].train)) for id in ids])
            shared = method.aggregate(shared, uploads, weights, ids)
        local = {**state.local, **{id: done[id].local for id in ids}}
        state = replace(state, round=number + 1, shared=shared, local=local)
        on_round(state, {**line, "seconds": round(perf_counter() - begin, 4)})
    return state


def _line(task: Task, done: Done) -> dict[str, float]:
    sent = tensors.count_bytes(task.sent) if task.trains else 0
    return {**done.scores, "bytes_down": sent, "bytes_up": tensors.count_bytes(done.upload or {})}


def disagreement(
    world: World,
    ids: Sequence[str],
    shared: Tensors,
    uploads: Sequence[Tensors],
    local: Sequence[Tensors],
) -> dict[str, float]:
    """How far the clients pull what is shared apart; nothing where uploads are no new values."""
    if len(ids) < 2 or not shared or any(one.keys() != shared.keys() for one in uploads):
        return {}
    start, ends = tensors.flat(shared), [tensors.flat(one) for one in uploads]
    out = {"cosine": mean_cosine(start, ends)}
    condition = getattr(world.method, "condition", None)
    if condition is not None:
        steps = [len(minibatches(world, id, 0)) for id in ids]
        out["difference"] = largest_difference(start, ends, steps, world.method.rate)
        conditions = [condition(one) for one in local]
        out["difference_bound"] = difference_bound(world.method.tau, conditions)
    return out


def means(plan: Plan, scores: Mapping[str, Scores]) -> dict[str, float | None]:
    """What a curve shows: the state before this round's update, averaged over clients."""
    own = [scores[id]["loss"] for id in sorted(scores) if id in plan.train]
    more: dict[str, float | None] = {}
    for name in METRICS[1:]:
        both = {"clients": metric(scores, plan.train, name)}
        both |= {"target": metric(scores, plan.unseen, name)}
        more |= {f"{who} {name}": one for who, one in both.items() if one is not None}
    return {
        **more,
        "loss": sum(own) / len(own),
        "validation": accuracy(scores, plan.train, "validation"),
        "accuracy": accuracy(scores, plan.train, "test"),
        "unseen": accuracy(scores, plan.unseen, "test"),
    }


def choose(plan: Plan, state: State, scores: Mapping[str, Scores]) -> State:
    """Keeps the state if it scores better than every one before it, as the selection says."""
    if plan.selection == "last":
        return state
    if plan.selection == "validation":
        score = accuracy(scores, plan.train, "validation") or 0.0
    else:
        score = accuracy(scores, {*plan.train, *plan.unseen}, "test") or 0.0
    if score <= state.best:
        return state
    return replace(
        state,
        best=score,
        best_round=state.round,
        best_shared=state.shared,
        best_local=dict(state.local),
    )


@dataclass(frozen=True)
class Outcome:
    """The chosen state after `adapt`, and how every client fares with it."""

    round: int
    shared: Tensors
    local: Mapping[str, Tensors]  # of every training client
    scores: Mapping[str, Scores]
    maps: Mapping[str, Mapping[str, float]]  # what the method says of each client's local tensors


def finish(world: World, engine: Engine, plan: Plan, state: State, fresh: Tensors) -> Outcome:
    method, frozen = world.method, world.frozen

    def tasks(state: State, train: Sequence[str]) -> list[Task]:
        return [
            Task(id, method.send(state.shared, id), state.local.get(id, fresh), id in train)
            for id in sorted({*plan.train, *plan.unseen})
        ]

    if plan.selection != "last":
        done = engine.round(method.rounds, tasks(state, ()))
        state = choose(plan, state, {id: one.scores for id, one in done.items()})
        assert state.best_shared is not None and state.best_local is not None
        state = replace(
            state, round=state.best_round, shared=state.best_shared, local=state.best_local
        )
    done = engine.adapt(method.rounds, tasks(state, plan.train))
    local = {id: done[id].local for id in sorted(plan.train)}
    describe = getattr(method, "describe", None)
    maps = {
        id: describe(frozen, state.shared, own) if describe else {} for id, own in local.items()
    }
    scores = {id: done[id].scores for id in sorted(done)}
    return Outcome(state.round, state.shared, local, scores, maps)
