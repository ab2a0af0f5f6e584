"""The aggregate of a round; no single upload from elsewhere can stop it or make it infinite."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from fedvlm import tensors
from fedvlm.channel.uploads import Arrived
from fedvlm.core import Conditioned, Method, Tensors
from fedvlm.engines.client import Answers, Done, here, steps
from fedvlm.errors import FederationError
from fedvlm.maths.conflict import difference_bound, largest_difference, mean_cosine


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


def disagreement(
    method: Any, shared: Tensors, uploads: Sequence[Tensors], done: Mapping[str, Done]
) -> dict[str, float]:
    """How far the clients pull what is shared apart; nothing where uploads are no new values."""
    if len(done) < 2 or not shared or any(one.keys() != shared.keys() for one in uploads):
        return {}
    keys = sorted(key for key in shared if shared[key].is_floating_point())
    each = [[one[key] for key in keys] for one in (shared, *uploads)]
    out = {"cosine": mean_cosine(each[0], each[1:])}
    counts = [steps(method, one.rows)[:2] for one in done.values()]
    walked = [epochs * each for epochs, each in counts]
    if isinstance(method, Conditioned):
        start, ends = tensors.flat(shared), [tensors.flat(one) for one in uploads]
        out["difference"] = largest_difference(start, ends, walked, method.rate)
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
