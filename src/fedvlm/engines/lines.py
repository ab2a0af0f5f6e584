"""What the line of a round tells beside its clients: how all fare, and how far they pull apart."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedvlm import tensors
from fedvlm.core import Conditioned, Described, Tensors, schedule
from fedvlm.engines.client import Done, Kept, Scores, Task, Terms, here
from fedvlm.engines.state import Plan
from fedvlm.evaluate.metrics import METRICS
from fedvlm.evaluate.scores import accuracy, metric
from fedvlm.maths.conflict import Agreement, difference_bound, largest_difference


def means(plan: Plan, scores: Mapping[str, Scores]) -> dict[str, float | None]:
    """What a curve shows: the state before this round's update, averaged over clients."""
    train = [id for id in plan.train if id in scores]
    own = [scores[id]["loss"] for id in sorted(train) if "loss" in scores[id]]
    more: dict[str, float | None] = {}
    for name in METRICS[1:]:
        both = {"clients": metric(scores, train, name)}
        both |= {"target": metric(scores, plan.unseen, name)}
        more |= {f"{who} {name}": one for who, one in both.items() if one is not None}
    return {
        **more,
        "loss": sum(own) / len(own) if own else None,
        "validation": accuracy(scores, train, "validation"),
        "accuracy": accuracy(scores, train, "test"),
        "unseen": accuracy(scores, plan.unseen, "test"),
    }


class Agreeing:
    """The mean cosine of uploads that come one part after the other."""

    def __init__(self, shared: Tensors) -> None:
        self.shared = shared
        self.keys = sorted(key for key in shared if shared[key].is_floating_point())
        self.known = Agreement([shared[key] for key in self.keys])
        self.able = bool(shared)

    def add(self, uploads: Sequence[Tensors]) -> None:
        self.able &= all(one.keys() == self.shared.keys() for one in uploads)
        for one in uploads if self.able else ():
            self.known.add([one[key] for key in self.keys])

    def told(self) -> dict[str, float]:
        return {"cosine": self.known.mean()} if self.able and self.known.clients > 1 else {}


def disagreement(
    method: Any, shared: Tensors, uploads: Sequence[Tensors], done: Mapping[str, Done]
) -> dict[str, float]:
    """How far the clients pull what is shared apart; nothing where uploads are no new values."""
    told = Agreeing(shared)
    told.add(uploads)
    out, pace = told.told(), schedule(method)
    if not out:
        return {}
    if isinstance(method, Conditioned):
        counts = [pace.steps(one.rows)[:2] for one in done.values()]
        walked = [epochs * each for epochs, each in counts]
        start, ends = tensors.flat(shared), [tensors.flat(one) for one in uploads]
        out["difference"] = largest_difference(start, ends, walked, method.lr)
        conditions = [
            method.condition(here(one.local))
            if one.described is None
            else one.described.get("condition")
            for one in done.values()
        ]
        known = [float(one) for one in conditions if one is not None]
        if len(known) == len(conditions):  # a site may leave its own out
            out["difference_bound"] = difference_bound(method.tau, known)
    return out


def line_of(task: Task, done: Done, size: int) -> dict[str, float]:
    sent = tensors.count_bytes(task.sent) if task.trains else 0
    return {**done.scores, "bytes_down": sent, "bytes_up": size}


def describe(terms: Terms, shared: Tensors, done: Done) -> Mapping[str, float]:
    """What the method says of a client's local tensors, or the client of its own."""
    method, local = terms.method, done.local
    if done.described is not None or not isinstance(method, Described) or isinstance(local, Kept):
        return done.described or {}
    return method.describe(terms.frozen, shared, local)
