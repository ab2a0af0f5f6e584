"""The loop over rounds: choose participants, send, update, aggregate, and keep the chosen state."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch

from fedvlm import seeds, tensors
from fedvlm.channel.pipeline import DecodedUploads, UploadPipeline, spent_epsilon
from fedvlm.core import Conditioned, Described, Method, Tensors, schedule, upload_sum
from fedvlm.engines.aggregate import UploadSums, aggregate_uploads, can_sum_uploads, drop_refused
from fedvlm.engines.attacks import apply_attack
from fedvlm.engines.batched import Batched, run_parts
from fedvlm.engines.client import (
    ClientReply,
    Local,
    RemoteState,
    RoundReplies,
    Scores,
    Task,
    TrainingTerms,
    World,
    as_tensors,
    local_names,
)
from fedvlm.engines.sequential import Sequential, error_context
from fedvlm.engines.state import POOLED_CLIENT, Plan, State, keep_best, selects_round, update_local, with_client_count
from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import METRICS, mean_accuracy, mean_metric
from fedvlm.machine import release_memory
from fedvlm.maths.client_drift import GradientAgreement, gradient_difference_bound, largest_gradient_difference
from fedvlm.parts.bodies import adapts
from fedvlm.storage.large_tensors import ClientStateStore

CLIENTS_PER_PART = 128  # clients of a large federation whose tensors are in memory at once
LARGE_ROUND_BYTES = 64 << 20  # bytes of a round's uploads and local tensors above which it is large


class Engine(Protocol):
    """An engine may leave out clients that do not answer, as long as enough of them do."""

    def round(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        """Everyone is measured with what it was sent; those that train then do."""
        ...

    def adapt(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        """The adaptation after the rounds; everyone is measured with what came of it."""
        ...

    def close(self) -> None: ...


def open_engine(name: str, world: World, workers: int, rounds: int) -> Engine:
    if name == "single":
        return Sequential(world)
    if name == "flower":
        from fedvlm.engines.flower.engine import InProcessEngine

        return InProcessEngine(world)
    return Batched(world, workers, rounds)


def initial_state(terms: TrainingTerms) -> tuple[State, Tensors]:
    """The state before the first round, and the local tensors of a client nobody has seen."""
    shared, local = terms.method.init(terms.frozen)
    if duplicates := shared.keys() & local.keys():
        raise SettingsError(f"method {terms.method.name}: {min(duplicates)!r} is both shared and local; rename one")
    return State(0, tensors.copy(shared), {}), tensors.copy(local)


def draw_participants(terms: TrainingTerms, plan: Plan, number: int) -> list[str]:
    """At least one client, drawn by seed; all of them for a fraction of 1."""
    ids = sorted(plan.train)
    count = max(1, round(plan.fraction * len(ids)))
    if count == len(ids):
        return ids
    generator = seeds.generator("participants", terms.seed, number)
    return sorted(ids[i] for i in torch.randperm(len(ids), generator=generator)[:count].tolist())


def ignore_sum(number: int, shared: Tensors, decoded: DecodedUploads) -> None:
    """Where nobody keeps the sums."""


def run_rounds(
    terms: TrainingTerms,
    engine: Engine,
    plan: Plan,
    state: State,
    initial_local: Local,
    on_round: Callable[[State, dict[str, Any]], None],
    until: int | None = None,
    on_sum: Callable[[int, Tensors, DecodedUploads], None] = ignore_sum,
) -> State:
    """Runs the rounds that are left, or those up to `until`.

    `on_round` gets each new state with the line to record; `on_sum` what was shared before a round
    and the uploads that were aggregated.
    """
    method = terms.method
    pipeline = UploadPipeline(terms.channel, method, local_names(initial_local), terms.seed)
    state = with_client_count(method, plan, state)
    for number in range(state.round, method.rounds if until is None else until):
        start_time = perf_counter()
        ids = draw_participants(terms, plan, number)
        # A round is chosen by what all clients make of it; else only participants are measured.
        measured_ids = sorted(plan.train) if selects_round(method, plan) else ids
        if selects_round(method, plan) and adapts(method):
            state = keep_best(plan, state, _evaluate_state(terms, engine, plan, state, initial_local))
        everyone = (*measured_ids, *sorted(plan.unseen))
        before: Mapping[str, Local] = state.local
        agreement: dict[str, float] = {}
        if _is_large(terms, state, initial_local, everyone):
            tasks, answers, decoded, before, agreement = _run_in_parts(
                terms, engine, pipeline, state, initial_local, everyone, ids
            )
        else:
            tasks = _make_tasks(method, state, initial_local, everyone, ids)
            answers = apply_attack(terms, plan.train, number, tasks, engine.round(number, tasks))
            decoded = _decode_uploads(terms, pipeline, state, number, tasks, answers)
        encoded_ids = {id for id, reply in answers.replies.items() if reply.is_encoded}
        shared, decoded = aggregate_uploads(method, state.shared, decoded, encoded_ids, number)
        answers = drop_refused(answers, decoded.refused, [task.id for task in tasks])
        on_sum(number, state.shared, decoded)
        done = answers.replies
        ids = [id for id in ids if id in done]
        scores = {id: reply.scores for id, reply in done.items()}
        if selects_round(method, plan) and not adapts(method):
            state = keep_best(plan, state, scores)
        line: dict[str, Any] = {"round": number, **mean_scores(plan, scores)}
        line |= agreement
        if decoded.ids == ids:  # a server that sees only their sum cannot tell how they differ
            line |= client_drift(method, state.shared, decoded.uploads, {id: done[id] for id in ids})
        line["clients"] = {
            t.id: client_line(t, done[t.id], decoded.sizes.get(t.id, 0)) | decoded.outliers.get(t.id, {})
            for t in tasks
            if t.id in done
        }
        if len(done) < len(tasks):
            line["missing"] = dict(answers.missing)
        channel_states = {**state.channel, **decoded.channel_states}
        if terms.channel.noise_multiplier:
            line["epsilon"] = spent_epsilon(terms.channel, channel_states)
        local = update_local(before, {id: done[id].local for id in ids if id not in decoded.stored})
        state = replace(state, round=number + 1, shared=shared, local=local, channel=channel_states)
        # A tower of every client is large, a state is not.
        del answers, done, tasks, decoded, shared, local, before
        if "image tower" in method.traits.needs:
            release_memory()
        on_round(state, {**line, "seconds": round(perf_counter() - start_time, 4)})
    return state


def _make_tasks(
    method: Method, state: State, initial_local: Local, ids: Iterable[str], train: Collection[str]
) -> list[Task]:
    best, train = state.best_local or {}, set(train)
    return [
        Task(
            id,
            method.send(state.shared, id),
            state.local.get(id, state.local.get(POOLED_CLIENT, initial_local)),
            id in train,
            best.get(id),
        )
        for id in ids
    ]


def _is_large(terms: TrainingTerms, state: State, initial_local: Local, ids: Sequence[str]) -> bool:
    """Whether what a round's clients hold and send is not to be in memory at once."""
    if len(ids) <= CLIENTS_PER_PART or isinstance(initial_local, RemoteState) or not can_sum_uploads(terms):
        return False
    bytes_per_client = tensors.count_bytes(state.shared) + 2 * tensors.count_bytes(initial_local)
    return bytes_per_client * len(ids) > LARGE_ROUND_BYTES


def _run_in_parts(
    terms: TrainingTerms,
    engine: Engine,
    pipeline: UploadPipeline,
    state: State,
    initial_local: Local,
    everyone: Sequence[str],
    ids: Sequence[str],
) -> tuple[list[Task], RoundReplies, DecodedUploads, Mapping[str, Local], dict[str, float]]:
    """A round of a large federation: uploads are summed as they come, and none is kept.

    Clients are held against those of their part, which are of like size: little is padded.
    """
    sizes = terms.members if isinstance(terms, World) else {}
    by_size = sorted(everyone, key=lambda id: -len(sizes[id].train)) if sizes else everyone
    tasks: dict[str, Task] = {}
    agreement = UploadAgreement(state.shared)
    done: dict[str, ClientReply] = {}
    total = UploadSums(upload_sum(terms.method))
    local = state.local
    parts = (
        _make_tasks(terms.method, state, initial_local, by_size[first : first + CLIENTS_PER_PART], ids)
        for first in range(0, len(everyone), CLIENTS_PER_PART)
    )
    for part_tasks, answers in run_parts(engine, state.round, parts):
        decoded = _decode_uploads(terms, pipeline, state, state.round, part_tasks, answers)
        local = update_local(local, {id: answers.replies[id].local for id in decoded.ids})
        total.add(decoded)
        agreement.add(decoded.uploads)
        tasks |= {task.id: replace(task, local={}) for task in part_tasks}
        done |= {id: replace(reply, upload=None, local={}) for id, reply in answers.replies.items()}
        del part_tasks, answers, decoded
        release_memory()  # else what is freed in pieces adds up
    in_order = [tasks[id] for id in everyone]
    return in_order, RoundReplies(done), total.to_decoded(), local, agreement.result()


def _decode_uploads(
    terms: TrainingTerms,
    pipeline: UploadPipeline,
    state: State,
    number: int,
    tasks: Sequence[Task],
    answers: RoundReplies,
) -> DecodedUploads:
    """The uploads through the channel, or its second half where a client did the first."""
    done = answers.replies
    tasks = [task for task in tasks if task.trains and task.id in done]
    return pipeline.run(
        number,
        {task.id: done[task.id].upload or {} for task in tasks},
        {task.id: task.sent for task in tasks},
        {task.id: done[task.id].rows for task in tasks},
        state.channel,
        {id for id, reply in done.items() if reply.is_encoded},
        lambda id: error_context(terms, number, id),
        answers.secure_sum,
        {task.id: done[task.id].releases for task in tasks},
    )


def _evaluate_state(
    terms: TrainingTerms, engine: Engine, plan: Plan, state: State, initial_local: Local
) -> dict[str, Scores]:
    """How everyone would fare if this state were the chosen one, its adaptation included."""
    everyone = sorted({*plan.train, *plan.unseen})
    method = terms.method
    run_tasks, training_ids = (engine.adapt, plan.train) if adapts(method) else (engine.round, ())
    answers = run_tasks(method.rounds, _make_tasks(method, state, initial_local, everyone, training_ids))
    return {id: reply.scores for id, reply in answers.replies.items()}


@dataclass(frozen=True)
class Outcome:
    """The chosen state after `adapt`, and how every client fares with it."""

    round: int
    shared: Tensors
    local: Mapping[str, Local]  # of every training client
    scores: Mapping[str, Scores]
    descriptions: Mapping[str, Mapping[str, float]]  # what the method says of each client's local tensors


def finish_training(terms: TrainingTerms, engine: Engine, plan: Plan, state: State, initial_local: Local) -> Outcome:
    method = terms.method
    everyone = sorted({*plan.train, *plan.unseen})
    if selects_round(method, plan):
        state = keep_best(plan, state, _evaluate_state(terms, engine, plan, state, initial_local))
        assert state.best_shared is not None and state.best_local is not None
        state = replace(state, round=state.best_round, shared=state.best_shared, local=state.best_local)
    store = state.local if isinstance(state.local, ClientStateStore) else None
    size = len(everyone) if store is None else CLIENTS_PER_PART
    scores: dict[str, Scores] = {}
    local: dict[str, Local] = {}
    descriptions: dict[str, Mapping[str, float]] = {}
    trains = set(plan.train)
    untouched: Mapping[str, float] | None = None
    parts = (
        _make_tasks(method, state, initial_local, everyone[first : first + size], trains)
        for first in range(0, len(everyone), max(1, size))
    )
    for _, answers in run_parts(engine, method.rounds, parts, last=True):
        done = answers.replies
        trained_replies = {id: done[id] for id in sorted(done) if id in trains}
        scores |= {id: done[id].scores for id in sorted(done)}
        for id, reply in trained_replies.items():
            # those who never took part are all alike
            known_description = untouched if reply.local is initial_local else None
            descriptions[id] = (
                describe_local(terms, state.shared, reply) if known_description is None else known_description
            )
            untouched = descriptions[id] if reply.local is initial_local else untouched
        new = {id: reply.local for id, reply in trained_replies.items()}
        if store is None:
            local |= new
        elif adapts(method):
            update_local(store, new)
    return Outcome(state.round, state.shared, local if store is None else store, scores, descriptions)


def mean_scores(plan: Plan, scores: Mapping[str, Scores]) -> dict[str, float | None]:
    """What a curve shows: the state before this round's update, averaged over clients."""
    train = [id for id in plan.train if id in scores]
    losses = [scores[id]["loss"] for id in sorted(train) if "loss" in scores[id]]
    extra_metrics: dict[str, float | None] = {}
    for name in METRICS[1:]:
        by_group = {"clients": mean_metric(scores, train, name)}
        by_group |= {"target": mean_metric(scores, plan.unseen, name)}
        extra_metrics |= {f"{group} {name}": score for group, score in by_group.items() if score is not None}
    return {
        **extra_metrics,
        "loss": sum(losses) / len(losses) if losses else None,
        "validation": mean_accuracy(scores, train, "validation"),
        "accuracy": mean_accuracy(scores, train, "test"),
        "unseen": mean_accuracy(scores, plan.unseen, "test"),
    }


class UploadAgreement:
    """The mean cosine of uploads that come one part after the other."""

    def __init__(self, shared: Tensors) -> None:
        self.shared = shared
        self.keys = sorted(key for key in shared if shared[key].is_floating_point())
        self.agreement = GradientAgreement([shared[key] for key in self.keys])
        self.is_comparable = bool(shared)

    def add(self, uploads: Sequence[Tensors]) -> None:
        self.is_comparable &= all(upload.keys() == self.shared.keys() for upload in uploads)
        for upload in uploads if self.is_comparable else ():
            self.agreement.add([upload[key] for key in self.keys])

    def result(self) -> dict[str, float]:
        return {"cosine": self.agreement.mean()} if self.is_comparable and self.agreement.clients > 1 else {}


def client_drift(
    method: Any, shared: Tensors, uploads: Sequence[Tensors], done: Mapping[str, ClientReply]
) -> dict[str, float]:
    """How far the clients pull what is shared apart; nothing where uploads are no new values."""
    agreement = UploadAgreement(shared)
    agreement.add(uploads)
    out, settings = agreement.result(), schedule(method)
    if not out:
        return {}
    if isinstance(method, Conditioned):
        counts = [settings.steps(entry.rows)[:2] for entry in done.values()]
        step_counts = [epochs * steps_per_epoch for epochs, steps_per_epoch in counts]
        start, ends = tensors.flatten(shared), [tensors.flatten(entry) for entry in uploads]
        out["difference"] = largest_gradient_difference(start, ends, step_counts, method.lr)
        conditions = [
            method.condition(as_tensors(entry.local))
            if entry.description is None
            else entry.description.get("condition")
            for entry in done.values()
        ]
        known_conditions = [float(entry) for entry in conditions if entry is not None]
        if len(known_conditions) == len(conditions):  # a site may leave its own out
            out["difference_bound"] = gradient_difference_bound(method.tau, known_conditions)
    return out


def client_line(task: Task, done: ClientReply, size: int) -> dict[str, float]:
    sent = tensors.count_bytes(task.sent) if task.trains else 0
    return {**done.scores, "bytes_down": sent, "bytes_up": size}


def describe_local(terms: TrainingTerms, shared: Tensors, done: ClientReply) -> Mapping[str, float]:
    """What the method says of a client's local tensors, or the client of its own."""
    method, local = terms.method, done.local
    if done.description is not None or not isinstance(method, Described) or isinstance(local, RemoteState):
        return done.description or {}
    return method.describe(terms.frozen, shared, local)
