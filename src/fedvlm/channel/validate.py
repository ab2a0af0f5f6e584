"""Refuses an upload that is not what the method sends, before it reaches the aggregate."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from fedvlm.channel.clip import change, norm
from fedvlm.channel.quantise import LOSS
from fedvlm.channel.settings import Channel
from fedvlm.core import Method, Tensors, sums
from fedvlm.errors import FederationError

Schema = Mapping[str, str]


def validate(upload: Tensors, local: Collection[str], where: str) -> None:
    """`where` names method, client and round."""
    for key, value in upload.items():
        if key in local:
            raise FederationError(f"{where}: the upload holds {key!r}, which is local; remove it")
        if value.is_floating_point() and not value.isfinite().all():
            raise FederationError(
                f"{where}: {int((~value.isfinite()).sum())} of {value.numel()} numbers of {key!r} "
                "are not finite; lower the rate, or look at this client's rows"
            )


def schema(tensors: Tensors) -> Schema:
    return {key: _kind(value.dtype, value.shape) for key, value in sorted(tensors.items())}


@lru_cache(maxsize=1024)
def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def longest(channel: Channel, numbers: int) -> float:
    """The largest norm that an honest change of this many numbers can have; infinite if any.

    The norm of noise passes its mean by six deviations once in a billion uploads. Rounding to 8
    bits, with what earlier rounds left over, adds an eighth at most.
    """
    if not channel.clip:
        return channel.most
    most = channel.clip * (1 + channel.noise_multiplier * (math.sqrt(numbers) + 6))
    if channel.quantise:
        most *= (1 + LOSS) / (1 - LOSS)
    return min(most * (1 + 1e-5), channel.most)


def plausible(rows: Any, channel: Channel, where: str) -> int:
    """A row count that a client said, unless nobody has as many: it would own the mean."""
    if type(rows) is not int or not 0 <= rows <= channel.max_samples:
        raise FederationError(
            f"{where}: it says it has {rows!r} training rows; between 0 and {channel.max_samples} "
            "(channel.max_samples) are believed"
        )
    return rows


@dataclass
class Inbox:
    """The server's view of one training: what was expected, what has come, and from whom."""

    channel: Channel
    local: Collection[str]  # names that may never arrive
    method: Method | None = None
    rows: dict[str, int] = field(default_factory=dict)  # as each client said the first time
    taken: set[str] = field(default_factory=set)  # clients whose upload of this round has come
    round: int = -1
    first: dict[str, tuple[str, Schema]] = field(default_factory=dict)
    latest: tuple[Tensors, Schema, str] | None = None  # all may be sent the same

    def __post_init__(self) -> None:  # once, not for every upload
        self.uneven = self.method.traits.uneven if self.method else frozenset[str]()
        self.kind = sums(self.method) if self.method else None

    def _given(self, sent: Tensors) -> tuple[Schema, str]:
        """What was sent, and the same in one word."""
        if self.latest is None or self.latest[0] is not sent:
            known = schema(sent)
            self.latest = sent, known, str(known)
        return self.latest[1:]

    def _begin(self, number: int) -> None:
        if number != self.round:
            self.round = number
            self.first.clear()
            self.taken.clear()

    def agree(
        self, number: int, uploads: Mapping[str, Tensors], sent: Mapping[str, Tensors]
    ) -> None:
        """Of those who were sent the same, the others are compared with what most of them upload;
        where as many upload one thing as another, with what is most like what was sent."""
        self._begin(number)
        groups: dict[str, dict[str, Schema]] = {}
        for id in sorted(uploads):
            groups.setdefault(self._given(sent[id])[1], {})[id] = self._even(uploads[id])
        for given, found in groups.items():
            words = {id: str(one) for id, one in found.items()}
            votes = Counter(words.values())
            firsts = {words[id]: id for id in reversed(words)}  # one stands for all that are alike
            wanted = schema(sent[min(found)]).items()

            def merit(id: str, found: Any = found, votes: Any = votes, wanted: Any = wanted) -> Any:
                return votes[str(found[id])], -len(found[id].items() ^ wanted)

            best = max(sorted(firsts.values()), key=merit)
            self.first[given] = (best, found[best])

    def _even(self, upload: Tensors) -> Schema:
        return {key: value for key, value in schema(upload).items() if key not in self.uneven}

    def check(
        self, upload: Tensors, sent: Tensors, rows: Any, client: str, number: int, where: str
    ) -> None:
        """Refuses what no sound client uploads, and a second upload in the same round."""
        self._begin(number)
        if client in self.taken:
            raise FederationError(
                f"{where}: an upload of this round has come already; it counts once"
            )
        validate(upload, self.local, where)
        self._like(upload, sent, client, where)
        self._rows(rows, client, where)
        numbers = sum(value.numel() for value in upload.values() if value.is_floating_point())
        most = longest(self.channel, numbers)
        if most < float("inf") and (length := norm(change(upload, sent))) > most:
            raise FederationError(
                f"{where}: its change has the norm {length:.4g}, more than {most:.4g}, the largest "
                "that the channel allows; it is not used"
            )
        self.taken.add(client)

    def _like(self, upload: Tensors, sent: Tensors, client: str, where: str) -> None:
        """Who is sent the same uploads the same; a mean is of what was sent."""
        (given, word), found = self._given(sent), self._even(upload)
        other, first = self.first.setdefault(word, (client, found))
        _compare(found, first, f"client {other}'s", where)
        if self.kind in ("rows", "clients") and found and found != given:
            _compare(found, {**found, **given}, "what was sent", where)

    def _rows(self, rows: Any, client: str, where: str) -> None:
        plausible(rows, self.channel, where)
        if self.rows.setdefault(client, rows) != rows:
            raise FederationError(
                f"{where}: it says it has {rows} training rows, but said {self.rows[client]} before"
            )


def _compare(found: Schema, wanted: Schema, whose: str, where: str) -> None:
    for key in sorted(found.keys() | wanted.keys()) if found != wanted else ():
        if found.get(key) != wanted.get(key):
            raise FederationError(
                f"{where}: {key!r} of its upload is {found.get(key, 'missing')}, but "
                f"{wanted.get(key, 'missing')} in {whose}; it runs another version or "
                "other settings"
            )
