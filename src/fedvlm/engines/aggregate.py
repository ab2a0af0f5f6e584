"""Aggregate a round's uploads; no single upload of another machine can stop it or make it infinite."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from fedvlm.channel.pipeline import EVERYONE, DecodedUploads
from fedvlm.core import Method, Tensors, UploadSum, upload_sum
from fedvlm.engines.client import RoundReplies, TrainingTerms
from fedvlm.errors import FederationError
from fedvlm.tensors import without_compiler


def can_sum_uploads(terms: TrainingTerms) -> bool:
    """Tell whether a round's uploads may be summed as they come, because nothing compares them."""
    channel = terms.channel
    is_plain = not (channel.compares_uploads or channel.verified or terms.attack)
    return is_plain and upload_sum(terms.method) is not None


class UploadSums:
    """Sum uploads that come one part after the other."""

    def __init__(self, kind: UploadSum | None) -> None:
        self.upload_sum, self.weight, self.rows = kind, 0.0, 0.0
        self.total: Tensors = {}
        self.types: dict[str, torch.dtype] = {}
        self.sizes: dict[str, int] = {}
        self.channel_states: dict[str, Tensors] = {}
        self.outliers: dict[str, dict[str, float]] = {}

    def add(self, decoded: DecodedUploads) -> None:
        self.rows += float(decoded.weights.double().sum())
        for upload, weight in zip(decoded.uploads, decoded.weights.tolist(), strict=True):
            weight_in_sum = weight if self.upload_sum == "samples" else 1.0
            self.weight += weight_in_sum
            for key, value in upload.items():
                is_integer = self.upload_sum == "total" and not value.is_floating_point()
                dtype = torch.long if is_integer else torch.float64
                running_sum = self.total.setdefault(key, torch.zeros(value.shape, dtype=dtype))
                running_sum.add_(value if is_integer else value.double(), alpha=1 if is_integer else weight_in_sum)
                self.types[key] = torch.long if is_integer else value.dtype
        self.sizes |= decoded.sizes
        self.channel_states |= decoded.channel_states
        self.outliers |= decoded.outliers

    def to_decoded(self) -> DecodedUploads:
        """Return one upload for all, their mean or total, as the aggregate gets a verified sum."""
        divisor = 1.0 if self.upload_sum == "total" else max(self.weight, 1e-300)
        mean_upload = {
            key: value if self.types[key] == torch.long else (value / divisor).to(self.types[key])
            for key, value in self.total.items()
        }
        out = DecodedUploads([EVERYONE], [mean_upload], torch.tensor([self.rows]), self.sizes, self.channel_states)
        return replace(out, outliers=self.outliers, stored=self.sizes.keys(), contributors=list(self.sizes))


@without_compiler()
def aggregate_uploads(
    method: Method, shared: Tensors, decoded: DecodedUploads, encoded_ids: Collection[str], number: int
) -> tuple[Tensors, DecodedUploads]:
    """Return the new shared tensors, and the uploads they were made of.

    If all uploads are of other machines (`encoded_ids`) and their aggregate fails or is not finite, one is left out,
    that with the largest value first; if it still fails without any one of them, two, and so on. With uploads of
    this process it is an error.
    """

    def try_aggregate(decoded: DecodedUploads) -> Tensors:
        if not any(decoded.uploads):
            return shared
        out = method.aggregate(shared, decoded.uploads, decoded.weights, decoded.contributors or decoded.ids)
        _check_finite(shared, out, method, number)
        return out

    try:
        return try_aggregate(decoded), decoded
    except Exception as error:
        if not set(decoded.ids) <= set(encoded_ids):
            raise
        reason = f"the aggregate fails with its upload ({type(error).__name__}); it is left out"
        first = error
    while len(decoded.ids) > 1:
        sizes = [_largest_value(upload) for upload in decoded.uploads]
        order = sorted(range(len(sizes)), key=lambda place: -sizes[place])
        for place in order:
            remaining = _drop_upload(decoded, place, f"round {number}: {reason}")
            with suppress(Exception):
                return try_aggregate(remaining), remaining
        decoded = _drop_upload(decoded, order[0], f"round {number}: {reason}")
    raise first


def _check_finite(before: Tensors, after: Tensors, method: Method, number: int) -> None:
    """Refuse an aggregate that is not finite, unless `init` has set infinite values."""
    for key, value in after.items():
        old = before.get(key)
        if not value.is_floating_point() or value.isfinite().all():
            continue
        if value.isnan().any() or (old is not None and old.isfinite().all()):
            raise FederationError(
                f"method {method.name}, round {number}: the aggregate of {key!r} is not finite; "
                "it is not kept, and the run can be resumed from the round before"
            )


def _largest_value(upload: Tensors) -> float:
    return max((float(tensor.abs().max()) for tensor in upload.values() if tensor.numel()), default=0.0)


def _drop_upload(decoded: DecodedUploads, place: int, reason: str) -> DecodedUploads:
    keep = [i for i in range(len(decoded.ids)) if i != place]
    ids, uploads = [decoded.ids[i] for i in keep], [decoded.uploads[i] for i in keep]
    refused = {**decoded.refused, decoded.ids[place]: reason}
    return replace(decoded, ids=ids, uploads=uploads, weights=decoded.weights[torch.tensor(keep)], refused=refused)


def drop_refused(answers: RoundReplies, refused: Mapping[str, str], participants: Sequence[str]) -> RoundReplies:
    """Return the replies without refused ones, if enough are left."""
    if not refused:
        return answers
    done = {id: reply for id, reply in answers.replies.items() if id not in refused}
    missing = {**answers.missing, **refused}
    if len(done) < answers.min_clients:
        reasons = "\n".join(f"  {id}: {reason}" for id, reason in sorted(missing.items()))
        raise FederationError(
            f"the answers of {len(done)} of {len(participants)} clients can be used, and {answers.min_clients} "
            f"must (quorum)\n{reasons}"
        )
    return replace(answers, replies=done, missing=missing)
