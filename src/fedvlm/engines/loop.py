"""The loop over rounds: choose participants, send, update, aggregate, and keep the chosen state."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch

from fedvlm import seeds, tensors
from fedvlm.channel.uploads import Arrived, Passage, spent_epsilon
from fedvlm.core import Method, Tensors, sums
from fedvlm.engines.aggregate import Summed, adds_up, aggregated, without
from fedvlm.engines.ahead import in_turn
from fedvlm.engines.attack import attacked
from fedvlm.engines.batched import Batched
from fedvlm.engines.client import (
    Answers,
    Done,
    Kept,
    Local,
    Scores,
    Task,
    Terms,
    World,
    names,
)
from fedvlm.engines.lines import Agreeing, describe, disagreement, line_of, means
from fedvlm.engines.single import Single, where
from fedvlm.engines.state import POOLED, Plan, State, after, choose, chooses, counted
from fedvlm.errors import SettingsError
from fedvlm.machine import give_back
from fedvlm.parts.bodies import adapts
from fedvlm.storage.shelf import Shelf

PART = 128  # clients of a large federation whose tensors are in memory at once
BULK = 64 << 20  # bytes of a round's uploads and local tensors above which it is large


class Engine(Protocol):
    """An engine may leave out clients that do not answer, as long as enough of them do."""

    def round(self, number: int, tasks: Sequence[Task]) -> Answers:
        """Everyone is measured with what it was sent; those that train then do."""
        ...

    def adapt(self, number: int, tasks: Sequence[Task]) -> Answers:
        """The adaptation after the rounds; everyone is measured with what came of it."""
        ...

    def close(self) -> None: ...


def open_engine(name: str, world: World, workers: int, rounds: int) -> Engine:
    if name == "single":
        return Single(world)
    if name == "flower":
        from fedvlm.engines.flower.local import InProcess  # takes a second to import

        return InProcess(world)
    return Batched(world, workers, rounds)


def start(terms: Terms) -> tuple[State, Tensors]:
    """The state before the first round, and the local tensors of a client nobody has seen."""
    shared, local = terms.method.init(terms.frozen)
    if both := shared.keys() & local.keys():
        raise SettingsError(
            f"method {terms.method.name}: {min(both)!r} is both shared and local; rename one"
        )
    return State(0, tensors.copy(shared), {}), tensors.copy(local)


def participants(terms: Terms, plan: Plan, number: int) -> list[str]:
    """At least one client, drawn by seed; all of them for a fraction of 1."""
    ids = sorted(plan.train)
    count = max(1, round(plan.fraction * len(ids)))
    if count == len(ids):
        return ids
    generator = seeds.generator("participants", terms.seed, number)
    return sorted(ids[i] for i in torch.randperm(len(ids), generator=generator)[:count].tolist())


def unheard(number: int, shared: Tensors, came: Arrived) -> None:
    """Where nobody keeps the sums."""


def train(
    terms: Terms,
    engine: Engine,
    plan: Plan,
    state: State,
    fresh: Local,
    on_round: Callable[[State, dict[str, Any]], None],
    until: int | None = None,
    on_sum: Callable[[int, Tensors, Arrived], None] = unheard,
) -> State:
    """Runs the rounds that are left, or those up to `until`.

    `on_round` gets each new state with the line to record; `on_sum` what was shared before a round
    and the uploads that were aggregated.
    """
    method = terms.method
    passage = Passage(terms.channel, method, names(fresh), terms.seed)
    state = counted(method, plan, state)
    for number in range(state.round, method.rounds if until is None else until):
        begin = perf_counter()
        ids = participants(terms, plan, number)
        # A round is chosen by what all clients make of it; else only participants are measured.
        known = sorted(plan.train) if chooses(method, plan) else ids
        if chooses(method, plan) and adapts(method):
            state = choose(plan, state, _reported(terms, engine, plan, state, fresh))
        everyone = (*known, *sorted(plan.unseen))
        before: Mapping[str, Local] = state.local
        told: dict[str, float] = {}
        if _bulky(terms, state, fresh, everyone):
            tasks, answers, came, before, told = _in_parts(
                terms, engine, passage, state, fresh, everyone, ids
            )
        else:
            tasks = _tasks(method, state, fresh, everyone, ids)
            answers = attacked(terms, plan.train, number, tasks, engine.round(number, tasks))
            came = _carry(terms, passage, state, number, tasks, answers)
        passed = {id for id, one in answers.done.items() if one.passed}
        shared, came = aggregated(method, state.shared, came, passed, number)
        answers = without(answers, came.refused, [task.id for task in tasks])
        on_sum(number, state.shared, came)
        done = answers.done
        ids = [id for id in ids if id in done]
        scores = {id: one.scores for id, one in done.items()}
        if chooses(method, plan) and not adapts(method):
            state = choose(plan, state, scores)
        line: dict[str, Any] = {"round": number, **means(plan, scores)}
        line |= told
        if came.ids == ids:  # a server that sees only their sum cannot tell how they differ
            line |= disagreement(method, state.shared, came.uploads, {id: done[id] for id in ids})
        line["clients"] = {
            t.id: line_of(t, done[t.id], came.sizes.get(t.id, 0)) | came.apart.get(t.id, {})
            for t in tasks
            if t.id in done
        }
        if len(done) < len(tasks):
            line["missing"] = dict(answers.missing)
        kept = {**state.channel, **came.kept}
        if terms.channel.noise_multiplier:
            line["epsilon"] = spent_epsilon(terms.channel, kept)
        local = after(before, {id: done[id].local for id in ids if id not in came.settled})
        state = replace(state, round=number + 1, shared=shared, local=local, channel=kept)
        # A tower of every client is large, a state is not.
        del answers, done, tasks, came, shared, local, before
        if "image tower" in method.traits.needs:
            give_back()
        on_round(state, {**line, "seconds": round(perf_counter() - begin, 4)})
    return state


def _tasks(
    method: Method, state: State, fresh: Local, ids: Iterable[str], train: Collection[str]
) -> list[Task]:
    best, train = state.best_local or {}, set(train)
    return [
        Task(
            id,
            method.send(state.shared, id),
            state.local.get(id, state.local.get(POOLED, fresh)),
            id in train,
            best.get(id),
        )
        for id in ids
    ]


def _bulky(terms: Terms, state: State, fresh: Local, ids: Sequence[str]) -> bool:
    """Whether what a round's clients hold and send is not to be in memory at once."""
    if len(ids) <= PART or isinstance(fresh, Kept) or not adds_up(terms):
        return False
    each = tensors.count_bytes(state.shared) + 2 * tensors.count_bytes(fresh)
    return each * len(ids) > BULK


def _in_parts(
    terms: Terms,
    engine: Engine,
    passage: Passage,
    state: State,
    fresh: Local,
    everyone: Sequence[str],
    ids: Sequence[str],
) -> tuple[list[Task], Answers, Arrived, Mapping[str, Local], dict[str, float]]:
    """A round of a large federation: uploads are summed as they come, and none is kept.

    Clients are held against those of their part, which are of like size: little is padded.
    """
    sizes = terms.members if isinstance(terms, World) else {}
    by_size = sorted(everyone, key=lambda id: -len(sizes[id].train)) if sizes else everyone
    tasks: dict[str, Task] = {}
    told = Agreeing(state.shared)
    done: dict[str, Done] = {}
    total = Summed(sums(terms.method))
    local = state.local
    parts = (
        _tasks(terms.method, state, fresh, by_size[first : first + PART], ids)
        for first in range(0, len(everyone), PART)
    )
    for some, answers in in_turn(engine, state.round, parts):
        came = _carry(terms, passage, state, state.round, some, answers)
        local = after(local, {id: answers.done[id].local for id in came.ids})
        total.add(came)
        told.add(came.uploads)
        tasks |= {task.id: replace(task, local={}) for task in some}
        done |= {id: replace(one, upload=None, local={}) for id, one in answers.done.items()}
        del some, answers, came
        give_back()  # else what is freed in pieces adds up
    in_order = [tasks[id] for id in everyone]
    return in_order, Answers(done), total.whole(), local, told.told()


def _carry(
    terms: Terms,
    passage: Passage,
    state: State,
    number: int,
    tasks: Sequence[Task],
    answers: Answers,
) -> Arrived:
    """The uploads through the channel, or its second half where a client did the first."""
    done = answers.done
    tasks = [task for task in tasks if task.trains and task.id in done]
    return passage.carry(
        number,
        {task.id: done[task.id].upload or {} for task in tasks},
        {task.id: task.sent for task in tasks},
        {task.id: done[task.id].rows for task in tasks},
        state.channel,
        {id for id, one in done.items() if one.passed},
        lambda id: where(terms, number, id),
        answers.total,
        {task.id: done[task.id].releases for task in tasks},
    )


def _reported(
    terms: Terms, engine: Engine, plan: Plan, state: State, fresh: Local
) -> dict[str, Scores]:
    """How everyone would fare if this state were the chosen one, its adaptation included."""
    everyone = sorted({*plan.train, *plan.unseen})
    method = terms.method
    verb, those = (engine.adapt, plan.train) if adapts(method) else (engine.round, ())
    answers = verb(method.rounds, _tasks(method, state, fresh, everyone, those))
    return {id: one.scores for id, one in answers.done.items()}


@dataclass(frozen=True)
class Outcome:
    """The chosen state after `adapt`, and how every client fares with it."""

    round: int
    shared: Tensors
    local: Mapping[str, Local]  # of every training client
    scores: Mapping[str, Scores]
    maps: Mapping[str, Mapping[str, float]]  # what the method says of each client's local tensors


def finish(terms: Terms, engine: Engine, plan: Plan, state: State, fresh: Local) -> Outcome:
    method = terms.method
    everyone = sorted({*plan.train, *plan.unseen})
    if chooses(method, plan):
        state = choose(plan, state, _reported(terms, engine, plan, state, fresh))
        assert state.best_shared is not None and state.best_local is not None
        state = replace(
            state, round=state.best_round, shared=state.best_shared, local=state.best_local
        )
    shelf = state.local if isinstance(state.local, Shelf) else None
    size = len(everyone) if shelf is None else PART
    scores: dict[str, Scores] = {}
    local: dict[str, Local] = {}
    maps: dict[str, Mapping[str, float]] = {}
    trains = set(plan.train)
    untouched: Mapping[str, float] | None = None
    parts = (
        _tasks(method, state, fresh, everyone[first : first + size], trains)
        for first in range(0, len(everyone), max(1, size))
    )
    for _, answers in in_turn(engine, method.rounds, parts, last=True):
        done = answers.done
        own = {id: done[id] for id in sorted(done) if id in trains}
        scores |= {id: done[id].scores for id in sorted(done)}
        for id, one in own.items():
            # those who never took part are all alike
            known = untouched if one.local is fresh else None
            maps[id] = describe(terms, state.shared, one) if known is None else known
            untouched = maps[id] if one.local is fresh else untouched
        new = {id: one.local for id, one in own.items()}
        if shelf is None:
            local |= new
        elif adapts(method):
            after(shelf, new)
    return Outcome(state.round, state.shared, local if shelf is None else shelf, scores, maps)
