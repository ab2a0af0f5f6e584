"""The whole way of an upload: what the client does to it, and what the server makes of it."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from fedvlm import seeds, tensors
from fedvlm.channel import compare, secure
from fedvlm.channel.clip import add_noise, apply, change, clip
from fedvlm.channel.quantise import SCALE, dequantise, quantise
from fedvlm.channel.settings import Channel, ChannelError
from fedvlm.channel.validate import Inbox, validate
from fedvlm.core import Method, Tensors, sums
from fedvlm.errors import FederationError
from fedvlm.maths.noise import Draw, seeded
from fedvlm.parts.robust import SHARES

SPENT = "spent"  # Σ 1/z² over a client's rounds: all of them are one Gaussian mechanism of it
COUNTED = "counted"  # how many uploads that is
KEPT = "channel/"  # where a client's channel keeps its own among the local tensors
LEFT = "left/"  # what rounding has left over


def leave(
    channel: Channel, upload: Tensors, sent: Tensors, kept: Tensors, draw: Draw
) -> tuple[Tensors, Tensors]:
    """At the client: the tensors that travel, and what its channel keeps for the next round.

    `draw` is the noise's: by seed in a simulation, from the system's entropy at a site.
    """
    if channel.clip and (whole := [k for k, v in upload.items() if not v.is_floating_point()]):
        raise ChannelError(
            f"the upload holds whole numbers in {whole[0]!r}, which can be neither clipped nor "
            "covered by noise; set channel.clip = 0, or choose another method"
        )
    if not (channel.clip or channel.quantise):
        return upload, kept
    moved = change(upload, sent)
    if channel.clip:
        moved = clip(moved, channel.clip)
    if channel.noise_multiplier:
        moved = add_noise(moved, channel.noise_multiplier * channel.clip, draw)
    if not channel.quantise:
        return apply(upload, sent, moved), kept
    left = {key.removeprefix(LEFT): value for key, value in kept.items() if key.startswith(LEFT)}
    small, left = quantise(moved, left)
    return {**upload, **small}, {**kept, **{LEFT + key: value for key, value in left.items()}}


def join(local: Tensors, kept: Tensors) -> Tensors:
    """A client's local tensors and what its channel keeps, to be stored in one place."""
    return {**local, **{KEPT + key: value for key, value in kept.items()}}


def split(held: Tensors) -> tuple[Tensors, Tensors]:
    kept = {key.removeprefix(KEPT): value for key, value in held.items() if key.startswith(KEPT)}
    return {key: value for key, value in held.items() if not key.startswith(KEPT)}, kept


def arrive(channel: Channel, travels: Tensors, sent: Tensors) -> Tensors:
    """At the server: the upload, from the tensors that travelled."""
    if not channel.quantise:
        return travels
    keys = [key for key in travels if key + SCALE in travels]
    scales = {key + SCALE for key in keys}
    moved = dequantise(travels, keys)
    whole = {key: moved.get(key, value) for key, value in travels.items() if key not in scales}
    return apply(whole, sent, moved)


def spend(channel: Channel, weights: Mapping[str, float]) -> dict[str, float]:
    """What one round costs each client, as 1/z² of the Gaussian mechanism that the server sees.

    It sees every upload, or in a secure sum only all of them with all their noise.
    """
    if not channel.noise_multiplier:
        return {}
    square = sum(weight**2 for weight in weights.values())
    return {
        id: (weight**2 / square if channel.secure else 1.0) / channel.noise_multiplier**2
        for id, weight in weights.items()
    }


def spent_epsilon(channel: Channel, kept: Mapping[str, Tensors]) -> float:
    """ε at δ of the client that has spent most: its changes against none at all."""
    from fedvlm.maths.accounting import epsilon

    spent = max((float(one[SPENT]) for one in kept.values() if SPENT in one), default=0.0)
    return epsilon(spent**-0.5, 1, delta=channel.delta) if spent else 0.0


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@dataclass(frozen=True)
class Arrived:
    """One round's uploads as the aggregate gets them."""

    ids: Sequence[str]
    uploads: Sequence[Tensors]
    weights: torch.Tensor
    sizes: Mapping[str, int]  # bytes that travelled, by client
    kept: Mapping[str, Tensors]  # what the channel keeps, by client
    refused: Mapping[str, str] = field(default_factory=dict)  # whose upload is not used, and why
    apart: Mapping[str, dict[str, float]] = field(default_factory=dict)  # how far from the others
    settled: Collection[str] = ()  # whose local tensors are where they belong
    # of uploads that are added up: clients with and without whom all others count as they came
    plain: frozenset[str] = frozenset()


class Passage:
    """Carries the uploads of one training."""

    def __init__(self, channel: Channel, method: Method, local: Sequence[str], seed: int) -> None:
        self.channel, self.kind, self.seed = channel, sums(method), seed
        self.releases: Mapping[str, int] = {}
        self.inbox, self.uneven = Inbox(channel, local, method), method.traits.uneven
        self.method = method

    def carry(
        self,
        number: int,
        uploads: Mapping[str, Tensors],
        sent: Mapping[str, Tensors],
        rows: Mapping[str, int],
        kept: Mapping[str, Tensors],
        passed: Collection[str],
        where: Callable[[str], str],
        total: Tensors | None = None,
        releases: Mapping[str, int] | None = None,
    ) -> Arrived:
        """`passed` are the clients that did their half themselves: their uploads are `leave`'s, and
        one that does not fit is left out; that of a client in this process is a mistake.

        If only a `total` came, of SecAgg+, it is all there is. `releases` are how many uploads have
        left each client by its own count, also those that never arrived: each has cost as much.
        """
        self.releases = releases or {}
        after = {id: kept.get(id, {}) for id in uploads}
        if total is not None:
            return self._sum(number, total, sent, rows, after, where(", ".join(uploads)))
        sizes, whole, refused = {}, {}, {}

        @contextmanager
        def judging(id: str) -> Iterator[None]:
            try:
                yield
            except ChannelError as error:
                if id not in passed:
                    raise FederationError(f"{where(id)}: {error}") from error
                refused[id] = f"{where(id)}: {error}"
            except Exception as error:
                if id not in passed:
                    raise
                known = isinstance(error, FederationError)
                refused[id] = str(error) if known else f"{where(id)}: its upload does not fit"

        for id, upload in uploads.items():
            with judging(id):
                travels = upload
                if id not in passed and not self.channel.off:
                    # where it is off, all there is to it is what the inbox looks at
                    validate(upload, self.inbox.local, where(id))
                    draw = seeded(seeds.generator("channel noise", self.seed, id, number))
                    travels, after[id] = leave(self.channel, upload, sent[id], after[id], draw)
                whole[id] = arrive(self.channel, travels, sent[id])
                sizes[id] = tensors.count_bytes(travels)
        self.inbox.agree(number, whole, sent)
        for id in list(whole):
            with judging(id):
                self.inbox.check(whole[id], sent[id], rows[id], id, number, where(id))
        self.inbox.latest = None  # it may be large
        whole = {id: one for id, one in whole.items() if id not in refused}
        ids = list(whole)
        after = {id: after[id] for id in ids}
        weights = torch.tensor([float(rows[id]) for id in ids])
        left = self._spent(after, self._weights(rows, [id for id in ids if uploads[id]]))
        came = Arrived(ids, list(whole.values()), weights, sizes, left, refused)
        if not any(uploads.values()):
            return came
        if not self.channel.secure:
            return self._compared(came, sent)
        masked, words = {}, (self.seed, number)
        for id, upload in whole.items():
            if own := [key for key in upload if key in self.uneven]:
                raise FederationError(
                    f"{where(id)}: {own[0]!r} is each client's own and has no sum; set "
                    "channel.secure = false"
                )
            mine = secure.weighted(upload, self._weights(rows, ids)[id], where(id))
            masked[id] = secure.mask(secure.fixed(mine, len(ids), where(id)), ids, id, words)
        sizes = {id: tensors.count_bytes(one) for id, one in masked.items()}
        one = secure.combined(secure.total(masked.values()), str(self.kind), whole[ids[0]])
        return Arrived(["everyone"], [one], weights.sum(0, keepdim=True), sizes, left, refused)

    def _compared(self, came: Arrived, sent: Mapping[str, Tensors]) -> Arrived:
        """Says who is far from the rest; bound and combined by a robust rule, where asked."""
        if self.kind is None or len({tuple(one) for one in came.uploads}) > 1:
            return came
        begun = [sent[id] for id in came.ids]
        now = compare.Round(self.method, self.kind, came.uploads, begun, came.weights)
        exact = len(begun) <= compare.FEW or self.channel.aggregation in SHARES
        dots = now.dots() if exact else now.about()
        ids, uploads, weights = compare.settle(self.channel, now, came.ids, dots)
        apart = compare.apart(came.ids, dots)
        plain: frozenset[str] = frozenset()
        if self.kind == "total" and self.channel.aggregation == "mean":
            median = self.channel.bound == "median"
            quiet = compare.quiet_without(now, dots) if median else [True] * len(came.ids)
            plain = frozenset(id for id, one in zip(came.ids, quiet, strict=True) if one)
        return replace(came, ids=ids, uploads=uploads, weights=weights, apart=apart, plain=plain)

    def _sum(
        self,
        number: int,
        total: Tensors,
        sent: Mapping[str, Tensors],
        rows: Mapping[str, int],
        kept: Mapping[str, Tensors],
        where: str,
    ) -> Arrived:
        first = sent[min(sent)]
        if any(not same(first, one) for one in sent.values()):
            raise FederationError(f"{where}: not all were sent the same, so there is no sum of it")
        one = secure.from_secagg(total, first, self.channel, where)
        size = tensors.count_bytes(total)  # as many numbers, of 8 bytes, come from each client
        weights = torch.tensor([float(sum(rows[id] for id in kept))])
        left = self._spent(kept, self._weights(rows, list(kept)))
        return Arrived(["everyone"], [one], weights, dict.fromkeys(kept, size), left)

    def _spent(
        self, kept: Mapping[str, Tensors], weights: Mapping[str, float]
    ) -> dict[str, Tensors]:
        """What the channel keeps, with this round's cost of privacy added."""
        after = dict(kept)
        for id, cost in spend(self.channel, weights).items():
            before = after[id].get(SPENT, torch.zeros((), dtype=torch.float64))
            known = int(after[id].get(COUNTED, 0))
            count = max(1, self.releases.get(id, 0) - known)
            after[id] = {**after[id], SPENT: before + cost * count}
            if self.releases.get(id):
                after[id][COUNTED] = torch.tensor(known + count)
        return {id: one for id, one in after.items() if one}

    def _weights(self, rows: Mapping[str, int], ids: Sequence[str]) -> dict[str, float]:
        """How much of the sum a client's upload is."""
        return {id: float(rows[id]) if self.kind == "rows" else 1.0 for id in ids}
