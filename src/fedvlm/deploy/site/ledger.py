"""What a site has given away so far, counted from its own ledger, and what may still leave.

A line of the ledger is written before its message leaves, so a crash can only count too much. A
request that has been answered is answered with the same bytes, which costs nothing more: the
same round asked for again would else be drawn with other noise, and the mean of many such has none.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Literal

from fedvlm.core import Method, schedule
from fedvlm.deploy.messages import RequestRefused
from fedvlm.deploy.site.policy import Policy, Protection
from fedvlm.engines.flower.messages import Arrays, Message, checksum, from_bytes, to_bytes
from fedvlm.errors import DataError
from fedvlm.maths.privacy import epsilon
from fedvlm.storage.files import open_for_append, write_file

LEDGER_FILE = "ledger.jsonl"
FIRST_HASH = "0" * 64  # what the first line says of the line before it
Direction = Literal["in", "out", "refused", "dropped"]


@dataclass(frozen=True)
class History:
    """A ledger as it was read: its sound lines, and what a crash or a hand has done to others."""

    lines: tuple[dict[str, Any], ...]
    torn: tuple[int, ...]  # numbers of lines that a crash cut short; nothing was sent for them
    broken: tuple[str, ...]  # what does not fit, line by line
    head: str  # the hash of the last line

    def contains(self, head: str) -> bool:
        """Whether a head that was noted before is still in the ledger."""
        return bool(head) and any(line["hash"].startswith(head) for line in self.lines)


class Ledger:
    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LEDGER_FILE

    def add(
        self,
        direction: Direction,
        round: int,
        tensors: Mapping[str, Any] | None = None,
        data: bytes = b"",
        **about: str | int | float | None,
    ) -> str:
        """Appends a line and returns its hash; call it before a message leaves.

        `data` is the message as it travels and `tensors` what it holds. `about` is anything else
        worth keeping: the run, the method, the reason of a refusal.
        """
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "direction": direction,
            "round": round,
            "fields": {
                key: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
                for key, value in (tensors or {}).items()
            },
            "bytes": len(data),
            "content": sha256(data).hexdigest(),
            **about,
        }
        with self._locked() as file:
            before, ended = _read_last_hash(file)
            line["before"] = before
            text = json.dumps(line | {"hash": _hash_line(line)}, ensure_ascii=False)
            # A line that a crash cut short stays, ended, so that nothing is ever taken away.
            file.write((("" if ended else "\n") + text + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        return _hash_line(line)

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """The file, open for appending by this process alone; others wait their turn."""
        with open_for_append(self.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def read(self) -> History:
        """All lines, each checked against the one before it."""
        if not self.path.is_file():
            raise DataError(f"there is no {self.path}; a site's folder has one after its first round")
        lines: list[dict[str, Any]] = []
        torn, broken = [], []
        head = FIRST_HASH
        for number, text in enumerate(_read_lines(self.path), start=1):
            line = _parse_line(text)
            if line is None:
                torn.append(number)
                continue
            if line["before"] != head:
                broken.append(f"line {number} does not follow the line before it")
            if line["hash"] != _hash_line({k: v for k, v in line.items() if k != "hash"}):
                broken.append(f"line {number} was changed after it was written")
            lines.append(line)
            head = line["hash"]
        return History(tuple(lines), tuple(torn), tuple(broken), head)


def _read_lines(path: Path) -> list[bytes]:
    texts = path.read_bytes().split(b"\n")
    return texts[:-1] if texts[-1] == b"" else texts


def _parse_line(text: bytes) -> dict[str, Any] | None:
    """None for a line that is no whole line: a crash cut it short before its message left."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"before", "hash"} <= line.keys() else None


def _read_last_hash(file: IO[bytes]) -> tuple[str, bool]:
    """The hash of the last whole line, and whether the file ends with the end of a line."""
    size = file.seek(0, os.SEEK_END)
    span = 1 << 14  # read from the end, because a ledger grows for years
    while True:
        file.seek(max(0, size - span))
        texts = file.read().split(b"\n")
        ended = texts[-1] == b""
        if span < size:  # the first piece may lack its beginning
            texts = texts[1:]
        for text in reversed(texts):
            if line := _parse_line(text):
                return str(line["hash"]), ended
        if span >= size:
            return FIRST_HASH, ended
        span *= 4


def _hash_line(line: Mapping[str, Any]) -> str:
    return sha256(json.dumps(line, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


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


def describe_spending(account: PrivacyBudget, policy: Policy) -> list[str]:
    """What has left by the ledger, beside what may."""
    if account.broken:
        return ["The ledger was changed: no request is answered until it is whole again."]
    out = [
        f"So far: {len(account.trainings)} of {policy.trainings} trainings, "
        f"{account.rounds.total()} of {policy.all_rounds} rounds."
    ]
    for key in sorted(account.trainings):
        spent = account.noise_spent.get(key, 0.0)
        eps = f", ε = {account.epsilon(policy.delta, key):.3g}" if spent else ""
        out.append(
            f"    training {key}: {account.rounds[key]} of {policy.rounds} rounds, "
            f"{account.measurements[key]} of {policy.measures} measurements{eps}"
        )
    if any(account.noise_spent.values()):
        limit = f" of {policy.epsilon:g}" if policy.epsilon else ""
        out.append(f"ε of all uploads with noise: {account.epsilon(policy.delta):.3g}{limit}.")
    return out


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
