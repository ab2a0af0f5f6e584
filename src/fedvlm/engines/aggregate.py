"""The aggregate of a round; no single upload from elsewhere can stop it or make it infinite."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from fedvlm.channel.uploads import Arrived
from fedvlm.core import Method, Sum, Tensors, sums
from fedvlm.engines.client import Answers, Terms
from fedvlm.errors import FederationError


def adds_up(terms: Terms) -> bool:
    """Whether a round's uploads may be summed as they come: nothing needs them side by side."""
    channel = terms.channel
    plain = not (channel.compares or channel.secure or terms.attack)
    return plain and sums(terms.method) is not None


class Summed:
    """Uploads that come one part after the other, as one that stands for all."""

    def __init__(self, kind: Sum | None) -> None:
        self.kind, self.weight, self.rows = kind, 0.0, 0.0
        self.total: Tensors = {}
        self.types: dict[str, torch.dtype] = {}
        self.sizes: dict[str, int] = {}
        self.kept: dict[str, Tensors] = {}
        self.apart: dict[str, dict[str, float]] = {}

    def add(self, came: Arrived) -> None:
        self.rows += float(came.weights.double().sum())
        for upload, weight in zip(came.uploads, came.weights.tolist(), strict=True):
            share = weight if self.kind == "rows" else 1.0
            self.weight += share
            for key, value in upload.items():
                whole = self.kind == "total" and not value.is_floating_point()
                kind = torch.long if whole else torch.float64
                sum_ = self.total.setdefault(key, torch.zeros(value.shape, dtype=kind))
                sum_.add_(value if whole else value.double(), alpha=1 if whole else share)
                self.types[key] = torch.long if whole else value.dtype
        self.sizes |= came.sizes
        self.kept |= came.kept
        self.apart |= came.apart

    def whole(self) -> Arrived:
        """As the aggregate gets a secure sum: one mean or total of everyone."""
        over = 1.0 if self.kind == "total" else max(self.weight, 1e-300)
        one = {
            key: value if self.types[key] == torch.long else (value / over).to(self.types[key])
            for key, value in self.total.items()
        }
        return Arrived(
            ["everyone"],
            [one],
            torch.tensor([self.rows]),
            self.sizes,
            self.kept,
            apart=self.apart,
            settled=self.sizes.keys(),
        )


def aggregated(
    method: Method, shared: Tensors, came: Arrived, passed: Collection[str], number: int
) -> tuple[Tensors, Arrived]:
    """What is shared from now on, and whose uploads it is of.

    Where the uploads are other machines' (`passed`) and their aggregate fails or is not finite,
    one is left out, that with the largest number first; if it fails without any one of them, two,
    and so on. An upload made in this process is a mistake, and said.
    """

    def tried(came: Arrived) -> Tensors:
        if not any(came.uploads):
            return shared
        out = method.aggregate(shared, came.uploads, came.weights, came.ids)
        _check_finite(shared, out, method, number)
        return out

    try:
        return tried(came), came
    except Exception as error:
        if not set(came.ids) <= set(passed):
            raise
        why = f"the aggregate fails with its upload ({type(error).__name__}); it is left out"
        first = error
    while len(came.ids) > 1:
        sizes = [_largest(one) for one in came.uploads]
        order = sorted(range(len(sizes)), key=lambda place: -sizes[place])
        for place in order:
            less = _without(came, place, f"round {number}: {why}")
            with suppress(Exception):
                return tried(less), less
        came = _without(came, order[0], f"round {number}: {why}")
    raise first


def _check_finite(before: Tensors, after: Tensors, method: Method, number: int) -> None:
    """Before a checkpoint keeps it; what a method sets to infinity on purpose it does at once."""
    for key, value in after.items():
        old = before.get(key)
        if not value.is_floating_point() or value.isfinite().all():
            continue
        if value.isnan().any() or (old is not None and old.isfinite().all()):
            raise FederationError(
                f"method {method.name}, round {number}: the aggregate of {key!r} is not finite; "
                "it is not kept, and the run can be resumed from the round before"
            )


def _largest(upload: Tensors) -> float:
    return max((float(one.abs().max()) for one in upload.values() if one.numel()), default=0.0)


def _without(came: Arrived, place: int, why: str) -> Arrived:
    keep = [i for i in range(len(came.ids)) if i != place]
    return replace(
        came,
        ids=[came.ids[i] for i in keep],
        uploads=[came.uploads[i] for i in keep],
        weights=came.weights[torch.tensor(keep)],
        refused={**came.refused, came.ids[place]: why},
    )


def without(answers: Answers, refused: Mapping[str, str], asked: Sequence[str]) -> Answers:
    """The answers without those that are not used, if enough are left."""
    if not refused:
        return answers
    done = {id: one for id, one in answers.done.items() if id not in refused}
    missing = {**answers.missing, **refused}
    if len(done) < answers.least:
        why = "\n".join(f"  {id}: {reason}" for id, reason in sorted(missing.items()))
        raise FederationError(
            f"the answers of {len(done)} of {len(asked)} clients can be used, and {answers.least} "
            f"must (quorum)\n{why}"
        )
    return replace(answers, done=done, missing=missing)
