"""The loop over rounds: draw participants, send, update, aggregate, and keep the selected state."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch

from fedvlm import seeds, tensors
from fedvlm.channel.pipeline import DecodedUploads, ReceivedUploads, UploadReceiver, spent_epsilon
from fedvlm.channel.verified import MIN_SUM_MEMBERS, check_state, class_limits, count_classes
from fedvlm.core import Conditioned, Described, Tensors, schedule, upload_sum
from fedvlm.engines import client
from fedvlm.engines.aggregate import UploadSums, aggregate_uploads, can_sum_uploads, drop_refused
from fedvlm.engines.attacks import apply_attack
from fedvlm.engines.batched import Batched, run_parts
from fedvlm.engines.sequential import Sequential, error_context
from fedvlm.engines.state import POOLED_CLIENT, Plan, State, keep_best, selects_round, update_local, with_client_count
from fedvlm.errors import FederationError, SettingsError
from fedvlm.evaluate.metrics import METRICS, mean_accuracy, mean_metric
from fedvlm.machine import release_memory
from fedvlm.maths.client_drift import GradientAgreement, gradient_difference_bound, largest_gradient_difference
from fedvlm.parts.bodies import adapts
from fedvlm.storage.large_tensors import ClientStateStore

CLIENTS_PER_PART = 128  # clients of a large federation whose tensors are in memory at once
LARGE_ROUND_BYTES = 64 << 20  # bytes of a round's uploads and local tensors above which it is large


@runtime_checkable
class StatePoster(Protocol):
    """An engine whose clients get all that is shared, because they aggregate themselves."""

    def post_state(self, shared: Tensors) -> None: ...


def open_engine(name: str, world: client.World, workers: int, rounds: int) -> client.Engine:
    """Open the engine of this name: sequential, flower or batched."""
    if name == "single":
        return Sequential(world)
    if name == "flower":
        from fedvlm.engines.flower.engine import InProcessEngine

        return InProcessEngine(world)
    return Batched(world, workers, rounds)


def initial_state(terms: client.TrainingTerms) -> tuple[State, Tensors]:
    """Return the state before the first round, and the local tensors of an unseen client."""
    shared, local = terms.method.init(terms.frozen)
    if duplicates := shared.keys() & local.keys():
        raise SettingsError(f"method {terms.method.name}: {min(duplicates)!r} is both shared and local; rename one")
    return State(0, tensors.copy(shared), {}), tensors.copy(local)


def draw_participants(terms: client.TrainingTerms, plan: Plan, number: int) -> list[str]:
    """Draw at least one client by seed; all of them for a fraction of 1."""
    ids = sorted(plan.train)
    count = max(1, round(plan.fraction * len(ids)))
    if count == len(ids):
        return ids
    generator = seeds.generator("participants", terms.seed, number)
    return sorted(ids[i] for i in torch.randperm(len(ids), generator=generator)[:count].tolist())


OnSum = Callable[[int, Tensors, DecodedUploads], None]


def ignore_sum(number: int, shared: Tensors, decoded: DecodedUploads) -> None:
    """Keep no sums."""


def run_rounds(
    terms: client.TrainingTerms,
    engine: client.Engine,
    plan: Plan,
    state: State,
    initial_local: client.Local,
    on_round: Callable[[State, dict[str, Any]], None],
    on_sum: OnSum = ignore_sum,
) -> State:
    """Run the rounds that are left, or those before `plan.stop`.

    `on_round` gets each new state with the line to record; `on_sum` gets what was shared before a round and the
    uploads that were aggregated.
    """
    training = _Training(terms, engine, plan, initial_local, sum_limits(terms, plan))
    receiver = UploadReceiver(terms.channel, terms.method, client.local_names(initial_local), terms.seed)
    state = with_client_count(terms.method, plan, state)
    for _ in range(state.round, terms.method.rounds if plan.stop is None else plan.stop):
        start_time = perf_counter()
        state, line = training.run_round(state, receiver, on_sum)
        if "image tower" in terms.method.traits.needs:
            release_memory()
        on_round(state, {**line, "seconds": round(perf_counter() - start_time, 4)})
    return state


def sum_limits(terms: client.TrainingTerms, plan: Plan) -> Tensors:
    """Sum the class counts of a verified sum first, as sites do by themselves; return what uploads may hold."""
    if not terms.channel.verified or not isinstance(terms, client.World):
        return {}
    if len(plan.train) < MIN_SUM_MEMBERS:
        raise FederationError(
            f"a verified sum hides a client among others and needs at least {MIN_SUM_MEMBERS}, got {len(plan.train)}; "
            "set channel.verified = false"
        )
    labels = [terms.y[torch.from_numpy(terms.members[id].train)] for id in plan.train]
    counts = [count_classes(y, len(terms.frozen.classes), terms.method) for y in labels]
    total = {key: torch.stack([count[key] for count in counts]).sum(0) for key in counts[0]}
    return class_limits(terms.method, terms.frozen.dim, total)


@dataclass(frozen=True)
class Outcome:
    """The selected state after `adapt`, and the scores of every client with it."""

    round: int
    shared: Tensors
    local: Mapping[str, client.Local]  # of every training client
    scores: Mapping[str, client.Scores]
    descriptions: Mapping[str, Mapping[str, float]]  # what the method says of each client's local tensors


def finish_training(
    terms: client.TrainingTerms, engine: client.Engine, plan: Plan, state: State, initial_local: client.Local
) -> Outcome:
    """Select the round to report, adapt the clients and measure them."""
    training = _Training(terms, engine, plan, initial_local)
    if selects_round(terms.method, plan):
        state = keep_best(plan, state, training.evaluate(state))
        assert state.best_shared is not None and state.best_local is not None
        state = replace(state, round=state.best_round, shared=state.best_shared, local=state.best_local)
    return training.adapt(state)


@dataclass
class _RoundResult:
    tasks: Sequence[client.Task]
    replies: client.RoundReplies
    decoded: DecodedUploads
    local: Mapping[str, client.Local]  # local tensors before the round, or after it where they are stored already
    agreement: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Training:
    """What the rounds of one training have in common."""

    terms: client.TrainingTerms
    engine: client.Engine
    plan: Plan
    initial_local: client.Local
    limits: Tensors = field(default_factory=dict)  # on the uploads of a verified sum

    def run_round(self, state: State, receiver: UploadReceiver, on_sum: OnSum) -> tuple[State, dict[str, Any]]:
        """Run one round; return the new state and the line to record."""
        terms, plan, method, number = self.terms, self.plan, self.terms.method, state.round
        ids = draw_participants(terms, plan, number)
        selects = selects_round(method, plan)
        if selects and adapts(method):
            state = keep_best(plan, state, self.evaluate(state))
        # A round is selected by the scores of all clients; otherwise only participants are measured.
        everyone = (*(sorted(plan.train) if selects else ids), *sorted(plan.unseen))
        result = (self._run_in_parts if self._is_large(state, everyone) else self._run_at_once)(
            state, receiver, everyone, ids
        )
        encoded_ids = {id for id, reply in result.replies.replies.items() if reply.is_encoded}
        shared, decoded = aggregate_uploads(method, state.shared, result.decoded, encoded_ids, number)
        if terms.channel.verified and decoded.contributors:
            check_state(terms.channel, method, state.shared, shared, len(decoded.contributors))
        answered = drop_refused(result.replies, decoded.refused, [task.id for task in result.tasks])
        on_sum(number, state.shared, decoded)
        replies = answered.replies
        ids = [id for id in ids if id in replies]
        scores = {id: reply.scores for id, reply in replies.items()}
        if selects and not adapts(method):
            state = keep_best(plan, state, scores)
        line: dict[str, Any] = {"round": number, **mean_scores(plan, scores), **result.agreement, **result.replies.line}
        if decoded.ids == ids:  # under a verified sum the server only sees the sum, so client drift is unknown
            line |= client_drift(method, state.shared, decoded.uploads, {id: replies[id] for id in ids})
        line["clients"] = {
            task.id: client_line(task, replies[task.id], decoded.sizes.get(task.id, 0))
            | decoded.outliers.get(task.id, {})
            for task in result.tasks
            if task.id in replies
        }
        if len(replies) < len(result.tasks):
            line["missing"] = dict(answered.missing)
        channel_states = {**state.channel, **decoded.channel_states}
        if terms.channel.noise_multiplier:
            line["epsilon"] = spent_epsilon(terms.channel, channel_states)
        local = update_local(result.local, {id: replies[id].local for id in ids if id not in decoded.stored})
        return replace(state, round=number + 1, shared=shared, local=local, channel=channel_states), line

    def _run_at_once(
        self, state: State, receiver: UploadReceiver, everyone: Sequence[str], ids: Sequence[str]
    ) -> _RoundResult:
        tasks = self.make_tasks(state, everyone, ids)
        tasks = [replace(task, sent={**task.sent, **self.limits}) for task in tasks] if self.limits else tasks
        if isinstance(self.engine, StatePoster):
            self.engine.post_state(state.shared)
        replies = self.engine.round(state.round, tasks)
        replies = apply_attack(self.terms, self.plan.train, state.round, tasks, replies)
        return _RoundResult(tasks, replies, self._decode(receiver, state, tasks, replies), state.local)

    def _is_large(self, state: State, ids: Sequence[str]) -> bool:
        """Tell whether the tensors of a round's clients are too large to be in memory at once."""
        initial_local = self.initial_local
        if isinstance(initial_local, client.RemoteState) or len(ids) <= CLIENTS_PER_PART:
            return False
        if not can_sum_uploads(self.terms):
            return False
        bytes_per_client = tensors.count_bytes(state.shared) + 2 * tensors.count_bytes(initial_local)
        return bytes_per_client * len(ids) > LARGE_ROUND_BYTES

    def _run_in_parts(
        self, state: State, receiver: UploadReceiver, everyone: Sequence[str], ids: Sequence[str]
    ) -> _RoundResult:
        """Run a round of a large federation by clients of similar size; uploads are summed as they come."""
        sizes = self.terms.members if isinstance(self.terms, client.World) else {}
        by_size = sorted(everyone, key=lambda id: -len(sizes[id].train)) if sizes else everyone
        tasks: dict[str, client.Task] = {}
        replies: dict[str, client.ClientReply] = {}
        agreement, total, local = UploadAgreement(state.shared), UploadSums(upload_sum(self.terms.method)), state.local
        size = CLIENTS_PER_PART
        parts = (self.make_tasks(state, by_size[at : at + size], ids) for at in range(0, len(everyone), size))
        for part_tasks, answered in run_parts(self.engine, state.round, parts):
            decoded = self._decode(receiver, state, part_tasks, answered)
            local = update_local(local, {id: answered.replies[id].local for id in decoded.ids})
            total.add(decoded)
            agreement.add(decoded.uploads)
            tasks |= {task.id: replace(task, local={}) for task in part_tasks}
            replies |= {id: replace(reply, upload=None, local={}) for id, reply in answered.replies.items()}
            del part_tasks, answered, decoded
            release_memory()  # otherwise small freed blocks add up
        in_order = [tasks[id] for id in everyone]
        return _RoundResult(in_order, client.RoundReplies(replies), total.to_decoded(), local, agreement.result())

    def make_tasks(self, state: State, ids: Iterable[str], train_ids: Collection[str]) -> list[client.Task]:
        """Return what each client is to do; only `train_ids` train."""
        best_local, train_ids = state.best_local or {}, set(train_ids)
        pooled = state.local.get(POOLED_CLIENT, self.initial_local)
        send = self.terms.method.send
        return [
            client.Task(id, send(state.shared, id), state.local.get(id, pooled), id in train_ids, best_local.get(id))
            for id in ids
        ]

    def _decode(
        self, receiver: UploadReceiver, state: State, tasks: Sequence[client.Task], answered: client.RoundReplies
    ) -> DecodedUploads:
        """Return the uploads of a round, or of a part of its clients, after the channel."""
        replies = {task.id: answered.replies[task.id] for task in tasks if task.trains and task.id in answered.replies}
        received = ReceivedUploads(
            round=state.round,
            uploads={id: reply.upload or {} for id, reply in replies.items()},
            sent={task.id: task.sent for task in tasks if task.id in replies},
            sample_counts={id: reply.rows for id, reply in replies.items()},
            channel_states=state.channel,
            encoded_ids={id for id, reply in replies.items() if reply.is_encoded},
            context_of=lambda id: error_context(self.terms, state.round, id),
            decoded_sum=answered.decoded_sum,
            releases={id: reply.releases for id, reply in replies.items()},
        )
        return receiver.receive(received)

    def evaluate(self, state: State) -> dict[str, client.Scores]:
        """Return the scores that every client would have if this state were selected, after adaptation."""
        everyone, method = sorted({*self.plan.train, *self.plan.unseen}), self.terms.method
        if adapts(method):
            answered = self.engine.adapt(method.rounds, self.make_tasks(state, everyone, self.plan.train))
        else:
            answered = self.engine.round(method.rounds, self.make_tasks(state, everyone, ()))
        return {id: reply.scores for id, reply in answered.replies.items()}

    def adapt(self, state: State) -> Outcome:
        """Adapt and measure every client, part by part where local tensors are on disk."""
        method, train_ids = self.terms.method, set(self.plan.train)
        everyone = sorted({*self.plan.train, *self.plan.unseen})
        if isinstance(self.engine, StatePoster):
            self.engine.post_state(state.shared)
        store = state.local if isinstance(state.local, ClientStateStore) else None
        size = len(everyone) if store is None else CLIENTS_PER_PART
        scores: dict[str, client.Scores] = {}
        local: dict[str, client.Local] = {}
        descriptions: dict[str, Mapping[str, float]] = {}
        untrained: Mapping[str, float] | None = None  # the description of all clients that never took part
        places = range(0, len(everyone), max(1, size))
        parts = (self.make_tasks(state, everyone[at : at + size], train_ids) for at in places)
        for _, answered in run_parts(self.engine, method.rounds, parts, last=True):
            replies = {id: answered.replies[id] for id in sorted(answered.replies)}
            scores |= {id: reply.scores for id, reply in replies.items()}
            trained = {id: reply for id, reply in replies.items() if id in train_ids}
            for id, reply in trained.items():
                if reply.local is not self.initial_local:
                    descriptions[id] = describe_local(self.terms, state.shared, reply)
                else:
                    untrained = describe_local(self.terms, state.shared, reply) if untrained is None else untrained
                    descriptions[id] = untrained
            new_local = {id: reply.local for id, reply in trained.items()}
            if store is None:
                local |= new_local
            elif adapts(method):
                update_local(store, new_local)
        return Outcome(state.round, state.shared, local if store is None else store, scores, descriptions)


def mean_scores(plan: Plan, scores: Mapping[str, client.Scores]) -> dict[str, float | None]:
    """Return what a curve shows: the scores of the state before this round's update, averaged over clients."""
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
    """Average the cosines between uploads that come one part after the other."""

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
    method: Any, shared: Tensors, uploads: Sequence[Tensors], done: Mapping[str, client.ClientReply]
) -> dict[str, float]:
    """Return how far the clients' uploads differ; nothing if uploads are not new values of what is shared."""
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
        own = {id: reply.description for id, reply in done.items()}  # as clients on other machines report it
        conditions = [
            method.condition(client.as_tensors(done[id].local)) if about is None else about.get("condition")
            for id, about in own.items()
        ]
        known_conditions = [float(entry) for entry in conditions if entry is not None]
        if len(known_conditions) == len(conditions):  # a site may withhold its own
            out["difference_bound"] = gradient_difference_bound(method.tau, known_conditions)
    return out


def client_line(task: client.Task, done: client.ClientReply, size: int) -> dict[str, float]:
    """Return a client's part of a round's line."""
    sent = tensors.count_bytes(task.sent) if task.trains else 0
    return {**done.scores, "bytes_down": sent, "bytes_up": size}


def describe_local(terms: client.TrainingTerms, shared: Tensors, done: client.ClientReply) -> Mapping[str, float]:
    """Return what the method, or the client itself, says of the client's local tensors."""
    method, local = terms.method, done.local
    if done.description is not None or not isinstance(method, Described) or isinstance(local, client.RemoteState):
        return done.description or {}
    return method.describe(terms.frozen, shared, local)
