"""What the line of a round tells beside its clients: how all fare, and how far they pull apart."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedvlm import tensors
from fedvlm.core import Conditioned, Described, Tensors, schedule
from fedvlm.engines.client import ClientReply, RemoteState, Scores, Task, TrainingTerms, as_tensors
from fedvlm.engines.state import Plan
from fedvlm.evaluate.metrics import METRICS
from fedvlm.evaluate.scores import accuracy, metric
from fedvlm.maths.client_drift import GradientAgreement, gradient_difference_bound, largest_gradient_difference


def mean_scores(plan: Plan, scores: Mapping[str, Scores]) -> dict[str, float | None]:
    """What a curve shows: the state before this round's update, averaged over clients."""
    train = [id for id in plan.train if id in scores]
    losses = [scores[id]["loss"] for id in sorted(train) if "loss" in scores[id]]
    extra_metrics: dict[str, float | None] = {}
    for name in METRICS[1:]:
        by_group = {"clients": metric(scores, train, name)}
        by_group |= {"target": metric(scores, plan.unseen, name)}
        extra_metrics |= {f"{group} {name}": score for group, score in by_group.items() if score is not None}
    return {
        **extra_metrics,
        "loss": sum(losses) / len(losses) if losses else None,
        "validation": accuracy(scores, train, "validation"),
        "accuracy": accuracy(scores, train, "test"),
        "unseen": accuracy(scores, plan.unseen, "test"),
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
