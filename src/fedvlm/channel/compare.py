"""A round's uploads held against each other: who is far from the rest, and what a minority may do.

What is compared is a client's change of what it was sent; of uploaded totals, such as TOFA's, what
they say per row, class by class among the clients that have the class.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import seeds
from fedvlm.channel.settings import Channel
from fedvlm.core import Method, Sum, Tensors, Totalled
from fedvlm.evaluate.far import OFTEN
from fedvlm.parts.robust import RULES, SHARES

LONGEST = 2.0  # times the median norm: where "median" shortens a change
DOUBLES = 1 << 22  # numbers that are compared at once: in float64 all would be large
FEW = 32  # clients up to which every dot is exact
BLOCK = 128  # of them that are multiplied with the others at once
PRODUCTS = 1 << 33  # of two numbers, above which the numbers of many clients are folded
FOLDED = 4096  # numbers that are left of a client then: a cosine is off by 0.016
HEAVIEST = 4.0  # times the median row count: where it stops to count
Said = dict[str, tuple[Tensor, Tensor]]  # (units, numbers) and the (units,) rows they are means of


@dataclass(frozen=True)
class Round:
    """One round's uploads, all of the same tensors."""

    method: Method
    kind: Sum
    uploads: Sequence[Tensors]
    sent: Sequence[Tensors]
    rows: Tensor  # (clients,) as they say

    def said(self, place: int, found: Tensors | None = None) -> Said:
        """What one client's totals say per row, knowing what was found of all."""
        upload = self.uploads[place]
        if isinstance(self.method, Totalled):
            return self.method.per_row(upload, found or {})
        rows = self.rows[place].double().clamp(min=1)[None]
        return {key: (value.double().reshape(1, -1) / rows, rows) for key, value in upload.items()}

    def whole(self, said: Said) -> Tensors:
        """The totals that say this."""
        if isinstance(self.method, Totalled):
            return self.method.whole(said)
        return {
            key: (value * rows[:, None]).reshape(self.uploads[0][key].shape)
            for key, (value, rows) in said.items()
        }

    def first(self, place: int, key: str) -> Tensor:
        """Where a client's tensor starts: what it was sent, or 0."""
        value, sent = self.uploads[place][key], self.sent[place].get(key)
        there = sent is not None and sent.shape == value.shape and sent.dtype == value.dtype
        return sent if sent is not None and there else torch.zeros_like(value)

    def stacks(
        self, found: Tensors | None = None, kind: torch.dtype = torch.float64
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """By name: (clients, units, numbers) and their (clients, units) rows; the caller's own.

        Each is filled client by client, so that there are never two copies of it; totals are
        kept in the precision of `kind`, its largest number standing for larger ones.
        """
        count = len(self.uploads)
        if self.kind != "total":
            for key, one in self.uploads[0].items():
                moved = one.new_empty(count, 1, one.numel())
                for i in range(count):
                    moved[i, 0] = (self.uploads[i][key] - self.first(i, key)).flatten()
                yield key, moved, torch.ones(count, 1)
            return
        values: Tensors = {}
        rows: Tensors = {}
        for i in range(count):
            for key, (one, many) in self.said(i, found).items():
                held = values.setdefault(key, torch.empty(count, *one.shape, dtype=kind))
                held[i] = one.clamp(-torch.finfo(kind).max, torch.finfo(kind).max)
                rows.setdefault(key, many.new_empty(count, *many.shape))[i] = many
        for key in list(values):
            yield key, values.pop(key), rows[key]

    def dots(self) -> Tensor:
        """(clients, clients) between their changes."""
        count = len(self.uploads)
        out = torch.zeros(count, count, dtype=torch.float64)
        for _, values, rows in self.stacks(kind=torch.float32):  # as uploads are
            moved = values.mul_((rows > 0)[..., None]).flatten(1)
            for some in torch.split(moved, max(1, DOUBLES // count), dim=1):
                part = some.double()
                out += part @ part.mT
        return out

    def about(self) -> Tensor:
        """`dots` of many clients: norms as they are, cosines in single precision.

        Of large uploads the cosines are those of signed sums, the same for all, of their numbers;
        the signs hang on what all have sent, so that nobody can aim at them.
        """
        count, numbers = len(self.uploads), len(self.moved(0))
        fold = count**2 * numbers > PRODUCTS and numbers > FOLDED
        every = torch.empty(count, FOLDED if fold else numbers)
        if fold:  # in two goes: the signs hang on all norms, and all numbers are too many
            norms = _lengths(self.moved(place) for place in range(count))
            drawn = seeds.generator("folded", *map(float.hex, norms.tolist()))
            signs = torch.randint(0, 2, (numbers,), generator=drawn) > 0
        for place in range(count):
            moved = self.moved(place)
            if fold:
                signed = torch.where(signs, moved, -moved) / numbers  # no sum is too large
                whole = torch.nn.functional.pad(signed, (0, -numbers % FOLDED))
                moved = whole.reshape(-1, FOLDED).sum(0)
            every[place] = moved
        norms = norms if fold else _lengths(every)
        return cosines(every).mul_(norms[:, None]).mul_(norms)

    def moved(self, place: int) -> Tensor:
        """(numbers,) one client's change, or what its totals say per row of what it has."""
        if self.kind != "total":
            upload = self.uploads[place]
            return torch.cat([(upload[key] - self.first(place, key)).flatten() for key in upload])
        most = torch.finfo(torch.float32).max  # stands for what is larger
        said = self.said(place).values()
        parts = [v.float().clamp(-most, most).mul_((n > 0)[:, None]).flatten() for v, n in said]
        return torch.cat(parts)


def _lengths(many: Iterable[Tensor]) -> Tensor:
    """One by one: of all at once torch would make a copy in float64."""
    return torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in many])


def cosines(many: Tensor) -> Tensor:
    """(clients, clients) between vectors, each two multiplied once; 0 with one that is 0."""
    if many.shape[1]:  # the caller's own are made short enough to be squared
        many /= torch.maximum(many.amax(1), -many.amin(1)).clamp(min=1e-30)[:, None]
    lengths = torch.linalg.vector_norm(many, dim=1).clamp(min=1e-30)
    out = torch.zeros(len(many), len(many))
    for first in range(0, len(many), BLOCK):
        rows = slice(first, first + BLOCK)
        some = many[rows] @ many[first:].mT / lengths[rows, None] / lengths[first:]
        out[rows, first:], out[first:, rows] = some, some.mT
    return out.clamp_(-1, 1).double()


def bounded(now: Round, dots: Tensor) -> Round:
    """Changes no longer than twice the median, and nobody's rows above four times the median."""
    if len(now.uploads) < 3:  # of two, neither is the measure of the other
        return now
    norms = dots.diagonal().sqrt()
    most = LONGEST * norms.median()
    shrink = torch.where(norms > most, most / norms.clamp(min=1e-300), 1.0)
    limit = HEAVIEST * now.rows.median()
    uploads = []
    for place, upload in enumerate(now.uploads):
        factor = float(shrink[place])
        if now.kind == "total":
            uploads.append(_lighter(now, place, factor, float(limit)))
        elif factor < 1:
            first = {key: now.first(place, key) for key in upload}
            moved = {key: factor * (value - first[key]) for key, value in upload.items()}
            uploads.append({key: (first[key] + moved[key]).to(first[key].dtype) for key in upload})
        else:
            uploads.append(upload)
    return Round(now.method, now.kind, uploads, now.sent, now.rows.clamp(max=limit))


def quiet_without(now: Round, dots: Tensor) -> list[bool]:
    """By client: whether `bounded` changes nobody's upload, neither with it nor without it."""
    norms, count = dots.diagonal().sqrt(), len(now.uploads)
    heavy = torch.tensor([_heaviest(now.said(place)) for place in range(count)])

    def quiet(keep: list[int]) -> bool:
        if len(keep) < 3:
            return True
        long = norms[keep] > LONGEST * norms[keep].median()
        return not bool((long | (heavy[keep] > HEAVIEST * now.rows[keep].median())).any())

    everyone = list(range(count))
    return [quiet(everyone) and quiet([i for i in everyone if i != out]) for out in everyone]


def _heaviest(said: Said) -> float:
    return max((float(rows.sum()) for _, rows in said.values() if len(rows)), default=0.0)


def _lighter(now: Round, place: int, factor: float, limit: float) -> Tensors:
    said = now.said(place)
    heaviest = _heaviest(said)
    if factor >= 1 and heaviest <= limit:
        return now.uploads[place]
    less = min(1.0, limit / max(heaviest, 1.0))
    return now.whole({key: (factor * value, less * rows) for key, (value, rows) in said.items()})


def combined(now: Round, rule: str, dots: Tensor) -> Tensors:
    """One upload in the place of all: the rule's mean of them, or its mean per row of all rows.

    Shares of krum and the geometric median are of all tensors at once, of totals unit by unit.
    """
    if now.kind != "total":
        shares = SHARES[rule](dots) if rule in SHARES else None
        out = {}
        for key, values, _ in now.stacks():
            flat = values[:, 0].double()
            moved = RULES[rule](flat) if shares is None else shares @ flat
            first = now.first(0, key)
            out[key] = (first.double() + moved.reshape(first.shape)).to(first.dtype)
        return out
    found = {key: value for key, (value, _) in _by_unit(now, rule, {}).items()}
    return now.whole(_by_unit(now, rule, found))


def _by_unit(now: Round, rule: str, found: Tensors) -> Said:
    """The rule unit by unit, among the clients that have rows of it."""
    said = {}
    for key, values, rows in now.stacks(found):
        means = torch.zeros_like(values[0])
        for unit in range(values.shape[1]):
            there = rows[:, unit] > 0
            if there.any() and values.shape[2]:
                means[unit] = RULES[rule](values[there, unit])
        said[key] = (means, rows.sum(0))
    return said


def settle(
    channel: Channel, now: Round, ids: Sequence[str], dots: Tensor
) -> tuple[Sequence[str], Sequence[Tensors], Tensor]:
    """Whom, what and how heavy the aggregate gets."""
    if channel.bound == "median":
        now = bounded(now, dots)
    if channel.aggregation == "mean":
        return ids, now.uploads, now.rows
    if channel.bound == "median":
        dots = now.dots()
    one = combined(now, channel.aggregation, dots)
    return ["everyone"], [one], now.rows.sum(0, keepdim=True)


COMPARED = 5  # clients below which nobody is called far: of four, who would be the rest?
ANYONE = 0.02  # what a client that points elsewhere counts beside them


@dataclass(frozen=True)
class Limits:
    """From where on a client is far; chosen by `tools/poisoning.py --choose`."""

    long: float = 2.5  # times as long as the clients that point alike
    short: float = 6.0  # part of their length
    norm: float = 3.0  # times the median of all, if it also points elsewhere:
    below: float = 0.3  # its cosine so much below the median one
    cosine: float = 0.7  # whatever its length
    spread: float = 6.0  # or this many median deviations of the cosines, if that is more
    often: float = OFTEN  # share of a client's rounds above which it is named


USUAL = Limits()


def apart(
    ids: Sequence[str], dots: Tensor, limits: Limits = USUAL
) -> dict[str, dict[str, float | bool]]:
    """By client: its norm against the median and against those alike, its cosine, and if it is far.

    The cosine is with the sum of the others' directions, so that a long one counts no more than
    any. A domain whose changes are long has several clients that point alike; one that is long
    beside those that point where it does has no such excuse.
    """
    norms = dots.diagonal().sqrt()
    if len(ids) < 3 or not float(norms.median()) > 0:
        return {}
    least = norms.clamp(min=1e-300)
    unit = (dots / least[:, None]).div_(least)
    mine = unit.sum(1) - unit.diagonal()
    others = unit.sum() - 2 * unit.sum(1) + unit.diagonal()
    cosines = mine / others.clamp(min=1e-12).sqrt()
    ratio, alike = norms / norms.median(), norms / _alike(norms, unit).clamp(min=1e-300)
    below = cosines.median() - cosines
    elsewhere = below > max(limits.cosine, limits.spread * float(below.abs().median()))
    far = (alike > limits.long) | (alike < 1 / limits.short) | elsewhere
    far |= (ratio > limits.norm) & (below > limits.below)
    if len(ids) < COMPARED:
        far[:] = False
    found = {"norm": ratio, "alike": alike, "cosine": cosines}
    told = {key: one.tolist() for key, one in found.items()} | {"far": far.tolist()}
    return {id: {key: one[i] for key, one in told.items()} for i, id in enumerate(ids)}


def _alike(norms: Tensor, unit: Tensor) -> Tensor:
    """(clients,) the median of the others' norms, each weighing as its cosine to the fourth."""
    weights = unit.clamp(min=0).square_().square_().add_(ANYONE).fill_diagonal_(0)
    order = norms.argsort()
    share = weights.index_select(1, order).cumsum_(1)
    return norms[order[(share < weights.sum(1, keepdim=True) / 2).sum(1)]]
