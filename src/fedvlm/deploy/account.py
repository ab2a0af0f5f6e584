"""What a site has given away so far, counted from its own ledger, and what may still leave.

A line of the ledger is written before its message leaves, so a crash can only count too much. A
request that has been answered is answered with the same bytes, which costs nothing more: the
same round asked for again would else be drawn with other noise, and the mean of many such has none.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedvlm.core import Method, schedule
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.policy import Policy, Protection
from fedvlm.deploy.reasons import RequestRefused
from fedvlm.engines.flower.wire import Arrays, Message, checksum, from_bytes, to_bytes
from fedvlm.maths.privacy import epsilon
from fedvlm.storage.files import write_file

MAX_CACHED_REPLIES = 8  # answers of a training that are kept to be given again
PER_MESSAGE_FIELDS = ("nonce", "checksum", "signature")  # of one message, and not of what is asked


class PrivacyBudget:
    """Trainings, rounds, measurements and ε, per training and in total."""

    def __init__(self, ledger: Ledger) -> None:
        self.trainings: set[str] = set()
        self.rounds: Counter[str] = Counter()
        self.measurements: Counter[str] = Counter()
        self.noise_spent: dict[str, float] = {}  # by training: Σ 1/z² of the noise of its uploads
        history = ledger.read() if ledger.path.exists() else None
        self.broken = bool(history and history.broken)
        for line in history.lines if history else ():
            self.count_line(line)

    def count_line(self, line: Mapping[str, Any]) -> None:
        """Counts a line of the ledger, if something left by it for the first time."""
        kind, training = line.get("costs"), str(line.get("training"))
        if kind == "training":
            self.trainings.add(training)
        elif kind == "measure":
            self.measurements[training] += 1
        elif kind == "upload":
            self.rounds[training] += 1
            self.noise_spent[training] = self.noise_spent.get(training, 0.0) + float(line.get("spends", 0.0))

    def admit(self, policy: Policy, kind: str, training: str, cost: float) -> None:
        """Refuses what would be more than the policy allows."""
        if self.broken:
            raise RequestRefused("ledger")
        if kind == "training" and training not in self.trainings:
            _check_limit(len(self.trainings), policy.trainings, "trainings")
        if kind == "measure":
            _check_limit(self.measurements[training], policy.measures, "measures")
        if kind != "upload":
            return
        _check_limit(self.rounds[training], policy.rounds, "rounds")
        _check_limit(self.rounds.total(), policy.all_rounds, "all rounds")
        if not policy.epsilon:
            return
        if not cost:
            raise RequestRefused("no noise", most=policy.epsilon)
        if self.epsilon(policy.delta, extra_cost=cost) > policy.epsilon:
            raise RequestRefused("epsilon", most=policy.epsilon)

    def admit_tuning(self, policy: Policy, trainings: int, rounds: int, cost: float) -> None:
        """Refuses a race that could not be run to its end, before anything of it has left."""
        if self.broken:
            raise RequestRefused("ledger")
        fits = len(self.trainings) + trainings <= policy.trainings
        fits &= self.rounds.total() + rounds <= policy.all_rounds
        if policy.epsilon and not cost:
            raise RequestRefused("no noise", most=policy.epsilon)
        if policy.epsilon:
            fits &= self.epsilon(policy.delta, extra_cost=cost * rounds) <= policy.epsilon
        if not fits:
            raise RequestRefused("race", trainings=trainings, rounds=rounds)

    def epsilon(self, delta: float, training: str | None = None, extra_cost: float = 0.0) -> float:
        """ε of the uploads that had noise: of a training, or of all together."""
        parts = self.noise_spent.values() if training is None else [self.noise_spent.get(training, 0.0)]
        total = sum(parts) + extra_cost
        return epsilon(total**-0.5, 1, delta=delta) if total else 0.0


def _check_limit(count: int, limit: int, kind: str) -> None:
    if count >= limit:
        raise RequestRefused(kind, most=limit)


def request_kind(about: Mapping[str, Any]) -> str:
    """Which of the counts a request is."""
    if about["kind"] == "open":
        return "training"
    return "upload" if about["kind"] == "round" and about["trains"] else "measure"


def upload_cost(method: Method, channel: Protection, rows: int) -> float:
    """1/z² of the noise that one upload has, of all its steps together; 0 if it has none."""
    if channel.noise_multiplier:
        return float(1 / channel.noise_multiplier**2)
    noise_multiplier = float(asdict(method).get("noise_multiplier", 0.0))
    if not noise_multiplier:
        return 0.0
    epochs, steps_per_epoch, _ = schedule(method).steps(rows)
    return epochs * steps_per_epoch / noise_multiplier**2


class ReplyCache:
    """The last answers of one training, by what was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "given"

    def path(self, request: Message) -> Path:
        about = {key: value for key, value in request.about.items() if key not in PER_MESSAGE_FIELDS}
        return self.folder / checksum(Message(about, request.arrays))

    def read(self, request: Message) -> tuple[Message, Message] | None:
        """The answer to the same request, but for the number that a reply has to name, and the
        state after it."""
        cached = self._read(self.path(request))
        if cached is None:
            return None
        return Message({**cached[0].about, "nonce": request.about["nonce"]}, cached[0].arrays), cached[1]

    def _read(self, path: Path) -> tuple[Message, Message] | None:
        try:
            stored = from_bytes(path.read_bytes())
            words = stored.about["reply"], stored.about["state"]
            if stored.about["checksum"] != _cache_checksum(*words, stored.arrays):
                return None
        except Exception:  # none, or damaged: then it is an answer like any other, and counted
            return None
        array_groups = [
            {key[2:]: array for key, array in stored.arrays.items() if key.startswith(mark)} for mark in ("r/", "s/")
        ]
        return Message(words[0], array_groups[0]), Message(words[1], array_groups[1])

    def uploads(self) -> Iterator[Message]:
        """The answers that are kept and had an upload that the server could read."""
        for path in sorted(self.folder.glob("*")):
            cached = self._read(path)
            if cached is not None and cached[0].arrays and not cached[0].about["masked"]:
                yield cached[0]

    def store(self, request: Message, reply: Message, state: Message) -> None:
        path = self.path(request)
        about = {key: value for key, value in reply.about.items() if key not in PER_MESSAGE_FIELDS}
        arrays = {f"r/{key}": array for key, array in reply.arrays.items()}
        arrays |= {f"s/{key}": array for key, array in state.arrays.items()}
        words = {"reply": about, "state": dict(state.about)}
        seal = _cache_checksum(about, state.about, arrays)
        write_file(path, to_bytes(Message({**words, "checksum": seal}, arrays)))
        old = sorted(self.folder.iterdir(), key=lambda array: (array.stat().st_mtime_ns, array.name))
        for array in old[:-MAX_CACHED_REPLIES]:
            if array != path:
                array.unlink()


def _cache_checksum(reply: Mapping[str, Any], state: Mapping[str, Any], arrays: Arrays) -> str:
    return checksum(Message({"both": [dict(reply), dict(state)]}, arrays))
