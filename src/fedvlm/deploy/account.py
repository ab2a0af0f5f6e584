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
from fedvlm.deploy.reasons import Refused
from fedvlm.engines.flower.wire import Arrays, Parcel, checksum, from_bytes, to_bytes
from fedvlm.maths.accounting import epsilon
from fedvlm.storage.files import write

KEEP = 8  # answers of a training that are kept to be given again
OWN = ("nonce", "checksum", "signature")  # of one message, and not of what is asked


class Account:
    """Trainings, rounds, measurements and ε, per training and in total."""

    def __init__(self, ledger: Ledger) -> None:
        self.trainings: set[str] = set()
        self.rounds: Counter[str] = Counter()
        self.measures: Counter[str] = Counter()
        self.spent: dict[str, float] = {}  # by training: Σ 1/z² of the noise of its uploads
        history = ledger.read() if ledger.path.exists() else None
        self.broken = bool(history and history.broken)
        for line in history.lines if history else ():
            self.note(line)

    def note(self, line: Mapping[str, Any]) -> None:
        """Counts a line of the ledger, if something left by it for the first time."""
        kind, training = line.get("costs"), str(line.get("training"))
        if kind == "training":
            self.trainings.add(training)
        elif kind == "measure":
            self.measures[training] += 1
        elif kind == "upload":
            self.rounds[training] += 1
            self.spent[training] = self.spent.get(training, 0.0) + float(line.get("spends", 0.0))

    def admit(self, policy: Policy, kind: str, training: str, cost: float) -> None:
        """Refuses what would be more than the policy allows."""
        if self.broken:
            raise Refused("ledger")
        if kind == "training" and training not in self.trainings:
            _below(len(self.trainings), policy.trainings, "trainings")
        if kind == "measure":
            _below(self.measures[training], policy.measures, "measures")
        if kind != "upload":
            return
        _below(self.rounds[training], policy.rounds, "rounds")
        _below(self.rounds.total(), policy.all_rounds, "all rounds")
        if not policy.epsilon:
            return
        if not cost:
            raise Refused("no noise", most=policy.epsilon)
        if self.epsilon(policy.delta, more=cost) > policy.epsilon:
            raise Refused("epsilon", most=policy.epsilon)

    def admit_race(self, policy: Policy, trainings: int, rounds: int, cost: float) -> None:
        """Refuses a race that could not be run to its end, before anything of it has left."""
        if self.broken:
            raise Refused("ledger")
        fits = len(self.trainings) + trainings <= policy.trainings
        fits &= self.rounds.total() + rounds <= policy.all_rounds
        if policy.epsilon and not cost:
            raise Refused("no noise", most=policy.epsilon)
        if policy.epsilon:
            fits &= self.epsilon(policy.delta, more=cost * rounds) <= policy.epsilon
        if not fits:
            raise Refused("race", trainings=trainings, rounds=rounds)

    def epsilon(self, delta: float, training: str | None = None, more: float = 0.0) -> float:
        """ε of the uploads that had noise: of a training, or of all together."""
        parts = self.spent.values() if training is None else [self.spent.get(training, 0.0)]
        total = sum(parts) + more
        return epsilon(total**-0.5, 1, delta=delta) if total else 0.0


def _below(count: int, most: int, kind: str) -> None:
    if count >= most:
        raise Refused(kind, most=most)


def what(about: Mapping[str, Any]) -> str:
    """Which of the counts a request is."""
    if about["kind"] == "open":
        return "training"
    return "upload" if about["kind"] == "round" and about["trains"] else "measure"


def cost(method: Method, channel: Protection, rows: int) -> float:
    """1/z² of the noise that one upload has, of all its steps together; 0 if it has none."""
    if channel.noise_multiplier:
        return float(1 / channel.noise_multiplier**2)
    own = float(asdict(method).get("noise_multiplier", 0.0))
    if not own:
        return 0.0
    epochs, each, _ = schedule(method).steps(rows)
    return epochs * each / own**2


class Given:
    """The last answers of one training, by what was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "given"

    def path(self, request: Parcel) -> Path:
        about = {key: value for key, value in request.about.items() if key not in OWN}
        return self.folder / checksum(Parcel(about, request.arrays))

    def read(self, request: Parcel) -> tuple[Parcel, Parcel] | None:
        """The answer to the same request, but for the number that a reply has to name, and the
        state after it."""
        kept = self._read(self.path(request))
        if kept is None:
            return None
        return Parcel({**kept[0].about, "nonce": request.about["nonce"]}, kept[0].arrays), kept[1]

    def _read(self, path: Path) -> tuple[Parcel, Parcel] | None:
        try:
            kept = from_bytes(path.read_bytes())
            words = kept.about["reply"], kept.about["state"]
            if kept.about["checksum"] != _seal(*words, kept.arrays):
                return None
        except Exception:  # none, or damaged: then it is an answer like any other, and counted
            return None
        both = [
            {key[2:]: one for key, one in kept.arrays.items() if key.startswith(mark)}
            for mark in ("r/", "s/")
        ]
        return Parcel(words[0], both[0]), Parcel(words[1], both[1])

    def uploads(self) -> Iterator[Parcel]:
        """The answers that are kept and had an upload that the server could read."""
        for path in sorted(self.folder.glob("*")):
            kept = self._read(path)
            if kept is not None and kept[0].arrays and not kept[0].about["masked"]:
                yield kept[0]

    def keep(self, request: Parcel, reply: Parcel, state: Parcel) -> None:
        path = self.path(request)
        about = {key: value for key, value in reply.about.items() if key not in OWN}
        arrays = {f"r/{key}": one for key, one in reply.arrays.items()}
        arrays |= {f"s/{key}": one for key, one in state.arrays.items()}
        words = {"reply": about, "state": dict(state.about)}
        seal = _seal(about, state.about, arrays)
        write(path, to_bytes(Parcel({**words, "checksum": seal}, arrays)))
        old = sorted(self.folder.iterdir(), key=lambda one: (one.stat().st_mtime_ns, one.name))
        for one in old[:-KEEP]:
            if one != path:
                one.unlink()


def _seal(reply: Mapping[str, Any], state: Mapping[str, Any], arrays: Arrays) -> str:
    return checksum(Parcel({"both": [dict(reply), dict(state)]}, arrays))
