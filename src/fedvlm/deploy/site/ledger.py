"""Record every message that enters or leaves a site in a hash-chained ledger, and count the privacy budget from it.

A line holds names, shapes, bytes and a hash, never a value. Lines are only appended, and each carries the hash of the
line before, so a line that was changed, moved or removed is found. Whoever can write to the file can also rewrite it
all, or cut off its end: only a head (the hash of the last line) that is kept elsewhere shows that.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Literal

from fedvlm.channel import Channel
from fedvlm.core import Method, schedule
from fedvlm.deploy.messages import RequestRefused
from fedvlm.deploy.site.policy import Policy
from fedvlm.engines.flower.messages import Message, checksum, from_bytes, seal, to_bytes, unseal
from fedvlm.errors import DataError
from fedvlm.maths.privacy import epsilon
from fedvlm.storage.files import open_for_append, write_file

LEDGER_FILE = "ledger.jsonl"
FIRST_HASH = "0" * 64  # what the first line says of the line before it
Direction = Literal["in", "out", "refused", "dropped", "consent"]


@dataclass(frozen=True)
class History:
    """Hold a ledger as it was read: its intact lines, and which lines were cut short or changed."""

    lines: tuple[dict[str, Any], ...]
    torn: tuple[int, ...]  # numbers of lines that a crash cut short; nothing was sent for them
    broken: tuple[str, ...]  # problems, line by line
    head: str  # the hash of the last line

    def contains(self, head: str) -> bool:
        """Return whether a head that was noted down before is still in the ledger."""
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
        **details: str | int | float | None,
    ) -> str:
        """Append a line and return its hash; call it before a message leaves.

        `data` is the message as it travels and `tensors` what it holds; `details` are the run, a refusal's reason, ...
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
            **details,
        }
        with open_for_append(self.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # others wait
            before, ended = _read_last_hash(file)
            line["before"] = before
            text = json.dumps(line | {"hash": _hash_line(line)}, ensure_ascii=False)
            # A line that a crash cut short stays, ended by a line break: nothing is ever removed.
            file.write((("" if ended else "\n") + text + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        return _hash_line(line)

    def read(self) -> History:
        """Return all lines, each checked against the one before it."""
        if not self.path.is_file():
            raise DataError(f"there is no {self.path}; a site's folder has one after its first round")
        return _extend(EMPTY_HISTORY, self.path.read_bytes())

    def history(self) -> History:
        """Return the checked lines; of a file that has grown, only what is new is read; empty if there is no file.

        A page that is open asks every second, consent is checked at every message, and a ledger grows for years.
        """
        try:
            with open(self.path, "rb") as file:
                info = os.fstat(file.fileno())
                inode, modified, offset, known = _histories.get(self.path, (0, 0, 0, EMPTY_HISTORY))
                is_same = info.st_size > offset or (info.st_size == offset and info.st_mtime_ns == modified)
                if inode != info.st_ino or not is_same:
                    offset, known = 0, EMPTY_HISTORY
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return History((), (), (), "")
        end = data.rfind(b"\n") + 1
        known = _extend(known, data[:end])
        _histories[self.path] = info.st_ino, info.st_mtime_ns, offset + end, known
        return _extend(known, data[end:])


EMPTY_HISTORY = History((), (), (), FIRST_HASH)
_histories: dict[Path, tuple[int, int, int, History]] = {}  # by file: inode, time, bytes of complete lines, and these


def _extend(history: History, data: bytes) -> History:
    """Return a history with more lines, each checked against the one before it."""
    if not data:
        return history
    lines, torn, broken = list(history.lines), list(history.torn), list(history.broken)
    head, first = history.head, len(lines) + len(torn) + 1
    for number, text in enumerate(data.removesuffix(b"\n").split(b"\n"), start=first):
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


def _parse_line(text: bytes) -> dict[str, Any] | None:
    """Return None for an incomplete line: a crash cut it short before its message left."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"before", "hash"} <= line.keys() else None


def _read_last_hash(file: IO[bytes]) -> tuple[str, bool]:
    """Return the hash of the last complete line, and whether the file ends with a line break."""
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


MAX_CACHED_REPLIES = 8  # per training, to answer a repeated request
PER_MESSAGE_FIELDS = ("nonce", "checksum", "signature")  # they differ between two messages with the same request


class PrivacyBudget:
    """Count trainings, rounds, measurements and ε, per training and in total, from a site's ledger.

    A line is written before its message leaves, so a crash can only count too much. A request that was answered is
    answered with the same bytes at no cost: drawn anew, the mean of many replies to one round would have no noise.
    """

    def __init__(self, history: History) -> None:
        self.trainings: set[str] = set()
        self.rounds: Counter[str] = Counter()
        self.measurements: Counter[str] = Counter()
        self.noise_spent: dict[str, float] = {}  # by training: Σ 1/z² of the noise of its uploads
        self.trainings_by_plan: Counter[str] = Counter()  # that people have consented to
        self.n_unnoised = 0  # uploads without noise
        self.broken = bool(history.broken)
        for line in history.lines:
            self.count_line(line)

    def count_line(self, line: Mapping[str, Any]) -> None:
        """Count a line of the ledger, if something left by it for the first time."""
        kind, training = line.get("costs"), str(line.get("training"))
        if kind == "training":
            self.trainings_by_plan[str(line.get("plan"))] += training not in self.trainings
            self.trainings.add(training)
        elif kind == "measurement":
            self.measurements[training] += int(line.get("count", 1))
        elif kind == "upload":
            self.rounds[training] += 1
            self.n_unnoised += not line.get("spends")
            self.noise_spent[training] = self.noise_spent.get(training, 0.0) + float(line.get("spends", 0.0))

    def admit(self, policy: Policy, kind: str, training: str, cost: float) -> None:
        """Refuse what would exceed the policy."""
        if self.broken:
            raise RequestRefused("ledger")
        if kind == "training" and training not in self.trainings:
            _check_limit(len(self.trainings), policy.trainings, "trainings")
        if kind == "measurement":
            _check_limit(self.measurements[training], policy.measures, "measurements")
        if kind == "upload":
            _check_limit(self.rounds[training], policy.rounds, "rounds")
            _check_limit(self.rounds.total(), policy.all_rounds, "all rounds")
            if self._exceeds_epsilon(policy, cost):
                raise RequestRefused("epsilon", most=policy.epsilon)

    def admit_tuning(self, policy: Policy, trainings: int, rounds: int, cost: float) -> None:
        """Refuse a tuning search that could not run to its end, before anything of it has left."""
        if self.broken:
            raise RequestRefused("ledger")
        exceeds = self._exceeds_epsilon(policy, cost, rounds)
        exceeds |= len(self.trainings) + trainings > policy.trainings
        if exceeds or self.rounds.total() + rounds > policy.all_rounds:
            raise RequestRefused("tuning", trainings=trainings, rounds=rounds)

    def _exceeds_epsilon(self, policy: Policy, cost: float, rounds: int = 1) -> bool:
        if policy.epsilon and not cost:
            raise RequestRefused("no noise", most=policy.epsilon)
        return bool(policy.epsilon) and self.epsilon(policy.delta, extra_cost=cost * rounds) > policy.epsilon

    def epsilon(self, delta: float, training: str | None = None, extra_cost: float = 0.0) -> float:
        """Return ε of the uploads that had noise: of one training, or of all together."""
        parts = self.noise_spent.values() if training is None else [self.noise_spent.get(training, 0.0)]
        total = sum(parts) + extra_cost
        return epsilon(total**-0.5, 1, delta=delta) if total else 0.0


def _check_limit(count: int, limit: int, code: str) -> None:
    if count >= limit:
        raise RequestRefused(code, most=limit)


def upload_cost(method: Method, channel: Channel, samples: int) -> float:
    """Return 1/z² of the noise of one upload, over all its steps; 0 if it has none."""
    if channel.noise_multiplier:
        return float(1 / channel.noise_multiplier**2)
    noise_multiplier = float(asdict(method).get("noise_multiplier", 0.0))
    if not noise_multiplier:
        return 0.0
    epochs, steps_per_epoch, _ = schedule(method).steps(samples)
    return epochs * steps_per_epoch / noise_multiplier**2


def describe_spending(budget: PrivacyBudget, policy: Policy) -> list[str]:
    """Return what has left by the ledger, beside what the policy allows."""
    if budget.broken:
        return ["The ledger was changed: no request is answered until it is restored."]
    total = f"{budget.rounds.total()} of {policy.all_rounds} rounds"
    out = [f"So far: {len(budget.trainings)} of {policy.trainings} trainings, {total}."]
    for key in sorted(budget.trainings):
        eps = f", ε = {budget.epsilon(policy.delta, key):.3g}" if budget.noise_spent.get(key) else ""
        measured = f"{budget.measurements[key]} of {policy.measures} measurements{eps}"
        out.append(f"    training {key}: {budget.rounds[key]} of {policy.rounds} rounds, {measured}")
    if any(budget.noise_spent.values()):
        limit = f" of {policy.epsilon:g}" if policy.epsilon else ""
        out.append(f"ε of all uploads with noise: {budget.epsilon(policy.delta):.3g}{limit}.")
    return out


class ReplyCache:
    """Keep the last replies of one training, by request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "replies"

    def path(self, request: Message) -> Path:
        return self.folder / checksum(Message(_lasting_fields(request), request.arrays))

    def read(self, request: Message) -> tuple[Message, Message] | None:
        """Return the reply to the same request, under the new nonce, and the state after it."""
        cached = self._read(self.path(request))
        if cached is None:
            return None
        return Message({**cached[0].header, "nonce": request.header["nonce"]}, cached[0].arrays), cached[1]

    def _read(self, path: Path) -> tuple[Message, Message] | None:
        try:
            stored = unseal(from_bytes(path.read_bytes()), path.name)
            headers = stored.header["reply"], stored.header["state"]
        except Exception:  # none, or damaged: then the request is answered anew, and counted
            return None
        reply, state = (
            Message(header, {key[2:]: array for key, array in stored.arrays.items() if key.startswith(prefix)})
            for header, prefix in zip(headers, ("r/", "s/"), strict=True)
        )
        return reply, state

    def uploads(self) -> Iterator[Message]:
        """Yield the cached replies with an upload."""
        for path in sorted(self.folder.glob("*")):
            cached = self._read(path)
            if cached is not None and cached[0].arrays:
                yield cached[0]

    def store(self, request: Message, reply: Message, state: Message) -> None:
        path = self.path(request)
        arrays = {f"r/{key}": array for key, array in reply.arrays.items()}
        arrays |= {f"s/{key}": array for key, array in state.arrays.items()}
        header = {"reply": _lasting_fields(reply), "state": dict(state.header)}
        write_file(path, to_bytes(seal(Message(header, arrays))))
        cached = sorted(self.folder.iterdir(), key=lambda file: (file.stat().st_mtime_ns, file.name))
        for old in cached[:-MAX_CACHED_REPLIES]:
            if old != path:
                old.unlink()


def _lasting_fields(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.header.items() if key not in PER_MESSAGE_FIELDS}
