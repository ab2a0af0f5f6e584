"""Compare a round's uploads: find outliers, bound long changes and combine uploads by robust rules.

What is compared is a client's change of what it was sent; of uploaded totals, such as TOFA's, what
they say per row, class by class among the clients that have the class.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedvlm import seeds
from fedvlm.channel.settings import Channel
from fedvlm.core import Method, Tensors, Totalled, UploadSum
from fedvlm.evaluate.metrics import MIN_OUTLIER_FRACTION
from fedvlm.parts.robust import ROBUST_MEANS, WEIGHTS_FROM_DOTS

MAX_NORM_TO_MEDIAN = 2.0  # times the median norm, to which `bound = "median"` shortens a change
VALUES_PER_PRODUCT = 1 << 22  # values that are multiplied at once: in float64 all would be large
MAX_EXACT_CLIENTS = 32  # clients up to which every dot product is exact
CLIENTS_PER_BLOCK = 128  # multiplied with all others at once
MAX_EXACT_PRODUCTS = 1 << 33  # multiplications above which the changes of many clients are sketched
SKETCH_SIZE = 4096  # values of a sketch: its cosines are off by 0.016
MAX_SAMPLES_TO_MEDIAN = 4.0  # times the median number of samples: more do not count
SampleMeans = dict[str, tuple[Tensor, Tensor]]  # means (units, values), and the samples (units,) behind them


@dataclass(frozen=True)
class UploadRound:
    """One round's uploads, all of the same tensors."""

    method: Method
    upload_sum: UploadSum
    uploads: Sequence[Tensors]
    sent: Sequence[Tensors]
    sample_counts: Tensor  # (clients,) as the clients report

    def to_means(self, place: int, reference_means: Tensors | None = None) -> SampleMeans:
        """Return one client's totals as means over its samples."""
        upload = self.uploads[place]
        if isinstance(self.method, Totalled):
            return self.method.to_means(upload, reference_means or {})
        rows = self.sample_counts[place].double().clamp(min=1)[None]
        return {key: (value.double().reshape(1, -1) / rows, rows) for key, value in upload.items()}

    def from_means(self, means: SampleMeans) -> Tensors:
        """Return the totals of such means."""
        if isinstance(self.method, Totalled):
            return self.method.from_means(means)
        return {
            key: (value * rows[:, None]).reshape(self.uploads[0][key].shape) for key, (value, rows) in means.items()
        }

    def start(self, place: int, key: str) -> Tensor:
        """Return what a client's tensor is measured from: what it was sent, or 0."""
        value, sent = self.uploads[place][key], self.sent[place].get(key)
        is_same_kind = sent is not None and sent.shape == value.shape and sent.dtype == value.dtype
        return sent if sent is not None and is_same_kind else torch.zeros_like(value)

    def stacks(
        self, reference_means: Tensors | None = None, dtype: torch.dtype = torch.float64
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield by name the changes (clients, units, values) and the samples (clients, units) behind them.

        Each is filled client by client, so that there are never two copies of it; totals are
        kept in the precision of `kind`, its largest number standing for larger ones.
        """
        count = len(self.uploads)
        if self.upload_sum != "total":
            for key, tensor in self.uploads[0].items():
                changes = tensor.new_empty(count, 1, tensor.numel())
                for i in range(count):
                    changes[i, 0] = (self.uploads[i][key] - self.start(i, key)).flatten()
                yield key, changes, torch.ones(count, 1)
            return
        values: Tensors = {}
        rows: Tensors = {}
        for i in range(count):
            for key, (tensor, counts) in self.to_means(i, reference_means).items():
                stored = values.setdefault(key, torch.empty(count, *tensor.shape, dtype=dtype))
                stored[i] = tensor.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
                rows.setdefault(key, counts.new_empty(count, *counts.shape))[i] = counts
        for key in list(values):
            yield key, values.pop(key), rows[key]

    def dots(self) -> Tensor:
        """Return the dot products (clients, clients) between the changes."""
        count = len(self.uploads)
        out = torch.zeros(count, count, dtype=torch.float64)
        for _, values, rows in self.stacks(dtype=torch.float32):  # the type of uploads
            changes = values.mul_((rows > 0)[..., None]).flatten(1)
            for columns in torch.split(changes, max(1, VALUES_PER_PRODUCT // count), dim=1):
                part = columns.double()
                out += part @ part.mT
        return out

    def approximate_dots(self) -> Tensor:
        """Return `dots` of many clients with exact norms and cosines in single precision.

        Of large uploads the cosines are those of signed sums, the same for all, of their numbers;
        the signs hang on what all have sent, so that nobody can aim at them.
        """
        count, numbers = len(self.uploads), len(self.change(0))
        is_sketched = count**2 * numbers > MAX_EXACT_PRODUCTS and numbers > SKETCH_SIZE
        changes = torch.empty(count, SKETCH_SIZE if is_sketched else numbers)
        if is_sketched:  # in two passes: the signs depend on all norms, and all changes do not fit into memory
            norms = _norms(self.change(place) for place in range(count))
            generator = seeds.generator("folded", *map(float.hex, norms.tolist()))
            signs = torch.randint(0, 2, (numbers,), generator=generator) > 0
        for place in range(count):
            change = self.change(place)
            if is_sketched:
                signed = torch.where(signs, change, -change) / numbers  # so that no sum overflows
                padded = torch.nn.functional.pad(signed, (0, -numbers % SKETCH_SIZE))
                change = padded.reshape(-1, SKETCH_SIZE).sum(0)
            changes[place] = change
        norms = norms if is_sketched else _norms(changes)
        return cosines(changes).mul_(norms[:, None]).mul_(norms)

    def change(self, place: int) -> Tensor:
        """Return one client's change (values,), or the means of its totals."""
        if self.upload_sum != "total":
            upload = self.uploads[place]
            return torch.cat([(upload[key] - self.start(place, key)).flatten() for key in upload])
        largest = torch.finfo(torch.float32).max  # replaces larger values
        means = self.to_means(place).values()
        parts = [v.float().clamp(-largest, largest).mul_((n > 0)[:, None]).flatten() for v, n in means]
        return torch.cat(parts)


def _norms(vectors: Iterable[Tensor]) -> Tensor:
    """Return norms one by one: for all at once torch would make a copy in float64."""
    return torch.stack([torch.linalg.vector_norm(vector, dtype=torch.float64) for vector in vectors])


def cosines(vectors: Tensor) -> Tensor:
    """Return the cosines (clients, clients) between vectors; 0 with a zero vector."""
    if vectors.shape[1]:  # scaled in place, so that squares do not overflow
        vectors /= torch.maximum(vectors.amax(1), -vectors.amin(1)).clamp(min=1e-30)[:, None]
    lengths = torch.linalg.vector_norm(vectors, dim=1).clamp(min=1e-30)
    out = torch.zeros(len(vectors), len(vectors))
    for first in range(0, len(vectors), CLIENTS_PER_BLOCK):
        rows = slice(first, first + CLIENTS_PER_BLOCK)
        block = vectors[rows] @ vectors[first:].mT / lengths[rows, None] / lengths[first:]
        out[rows, first:], out[first:, rows] = block, block.mT
    return out.clamp_(-1, 1).double()


def bound_uploads(upload_round: UploadRound, dots: Tensor) -> UploadRound:
    """Shorten changes to twice the median norm, and cap sample counts at four times their median."""
    if len(upload_round.uploads) < 3:  # two clients have no majority
        return upload_round
    norms = dots.diagonal().sqrt()
    max_norm = MAX_NORM_TO_MEDIAN * norms.median()
    shrink = torch.where(norms > max_norm, max_norm / norms.clamp(min=1e-300), 1.0)
    limit = MAX_SAMPLES_TO_MEDIAN * upload_round.sample_counts.median()
    uploads = []
    for place, upload in enumerate(upload_round.uploads):
        factor = float(shrink[place])
        if upload_round.upload_sum == "total":
            uploads.append(_bound_totals(upload_round, place, factor, float(limit)))
        elif factor < 1:
            first = {key: upload_round.start(place, key) for key in upload}
            change = {key: factor * (value - first[key]) for key, value in upload.items()}
            uploads.append({key: (first[key] + change[key]).to(first[key].dtype) for key in upload})
        else:
            uploads.append(upload)
    return replace(upload_round, uploads=uploads, sample_counts=upload_round.sample_counts.clamp(max=limit))


def unchanged_without(upload_round: UploadRound, dots: Tensor) -> list[bool]:
    """Tell for each client whether `bound_uploads` changes no upload, neither with nor without the client."""
    norms, count = dots.diagonal().sqrt(), len(upload_round.uploads)
    sample_counts = torch.tensor([_max_samples(upload_round.to_means(place)) for place in range(count)])

    def is_unchanged(keep: list[int]) -> bool:
        if len(keep) < 3:
            return True
        is_long = norms[keep] > MAX_NORM_TO_MEDIAN * norms[keep].median()
        limit = MAX_SAMPLES_TO_MEDIAN * upload_round.sample_counts[keep].median()
        return not bool((is_long | (sample_counts[keep] > limit)).any())

    everyone = list(range(count))
    return [is_unchanged(everyone) and is_unchanged([i for i in everyone if i != out]) for out in everyone]


def _max_samples(means: SampleMeans) -> float:
    return max((float(rows.sum()) for _, rows in means.values() if len(rows)), default=0.0)


def _bound_totals(upload_round: UploadRound, place: int, factor: float, limit: float) -> Tensors:
    means = upload_round.to_means(place)
    n_samples = _max_samples(means)
    if factor >= 1 and n_samples <= limit:
        return upload_round.uploads[place]
    factor_of_samples = min(1.0, limit / max(n_samples, 1.0))
    bounded = {key: (factor * value, factor_of_samples * rows) for key, (value, rows) in means.items()}
    return upload_round.from_means(bounded)


def combine_uploads(upload_round: UploadRound, rule: str, dots: Tensor) -> Tensors:
    """Combine all uploads by a robust rule: changes with all tensors at once, means of totals unit by unit."""
    if upload_round.upload_sum != "total":
        client_weights = WEIGHTS_FROM_DOTS[rule](dots) if rule in WEIGHTS_FROM_DOTS else None
        out = {}
        for key, values, _ in upload_round.stacks():
            flat = values[:, 0].double()
            change = ROBUST_MEANS[rule](flat) if client_weights is None else client_weights @ flat
            first = upload_round.start(0, key)
            out[key] = (first.double() + change.reshape(first.shape)).to(first.dtype)
        return out
    reference_means = {key: value for key, (value, _) in _combine_units(upload_round, rule, {}).items()}
    return upload_round.from_means(_combine_units(upload_round, rule, reference_means))


def _combine_units(upload_round: UploadRound, rule: str, reference_means: Tensors) -> SampleMeans:
    """Apply the rule unit by unit, among the clients that have samples of it."""
    combined_means = {}
    for key, values, rows in upload_round.stacks(reference_means):
        means = torch.zeros_like(values[0])
        for unit in range(values.shape[1]):
            has_unit = rows[:, unit] > 0
            if has_unit.any() and values.shape[2]:
                means[unit] = ROBUST_MEANS[rule](values[has_unit, unit])
        combined_means[key] = (means, rows.sum(0))
    return combined_means


def bound_and_combine(
    channel: Channel, upload_round: UploadRound, ids: Sequence[str], dots: Tensor
) -> tuple[Sequence[str], Sequence[Tensors], Tensor]:
    """Return the ids, uploads and weights for the aggregate."""
    if channel.bound == "median":
        upload_round = bound_uploads(upload_round, dots)
    if channel.aggregation == "mean":
        return ids, upload_round.uploads, upload_round.sample_counts
    if channel.bound == "median":
        dots = upload_round.dots()
    combined_upload = combine_uploads(upload_round, channel.aggregation, dots)
    return ["everyone"], [combined_upload], upload_round.sample_counts.sum(0, keepdim=True)


MIN_COMPARED_CLIENTS = 5  # with fewer clients there is no majority to be an outlier from
MIN_SIMILARITY_WEIGHT = 0.02  # weight of a client that points elsewhere


@dataclass(frozen=True)
class OutlierLimits:
    """When a client is an outlier; chosen by `tools/poisoning.py --choose`."""

    max_norm_ratio: float = 2.5  # norm relative to clients of a similar direction
    max_inverse_ratio: float = 6.0  # or their norm relative to its own
    max_ratio_if_elsewhere: float = 3.0  # norm relative to the median, if it also points elsewhere:
    cosine_gap_if_long: float = 0.3  # its cosine is this much below the median
    cosine_gap: float = 0.7  # for any norm
    cosine_gap_deviations: float = 6.0  # or this many median deviations of the cosines, if that is more
    max_outlier_fraction: float = MIN_OUTLIER_FRACTION  # of a client's rounds, above which it is reported


DEFAULT_LIMITS = OutlierLimits()


def outlier_scores(
    ids: Sequence[str], dots: Tensor, limits: OutlierLimits = DEFAULT_LIMITS
) -> dict[str, dict[str, float | bool]]:
    """Return for each client its norm relative to the median and to similar clients, its cosine, and if it is far.

    The cosine is with the sum of the others' directions, so that a long one counts no more than
    any. A domain whose changes are long has several clients that point alike; one that is long
    beside those that point where it does has no such excuse.
    """
    norms = dots.diagonal().sqrt()
    if len(ids) < 3 or not float(norms.median()) > 0:
        return {}
    safe_norms = norms.clamp(min=1e-300)
    unit_dots = (dots / safe_norms[:, None]).div_(safe_norms)
    similarity_to_rest = unit_dots.sum(1) - unit_dots.diagonal()
    rest_norm_squared = unit_dots.sum() - 2 * unit_dots.sum(1) + unit_dots.diagonal()
    cosines = similarity_to_rest / rest_norm_squared.clamp(min=1e-12).sqrt()
    ratio, ratio_to_similar = norms / norms.median(), norms / _norm_of_similar(norms, unit_dots).clamp(min=1e-300)
    cosine_gaps = cosines.median() - cosines
    deviations = limits.cosine_gap_deviations * float(cosine_gaps.abs().median())
    is_outlier = cosine_gaps > max(limits.cosine_gap, deviations)
    is_outlier |= (ratio_to_similar > limits.max_norm_ratio) | (ratio_to_similar < 1 / limits.max_inverse_ratio)
    is_outlier |= (ratio > limits.max_ratio_if_elsewhere) & (cosine_gaps > limits.cosine_gap_if_long)
    if len(ids) < MIN_COMPARED_CLIENTS:
        is_outlier[:] = False
    scores = {"norm": ratio, "alike": ratio_to_similar, "cosine": cosines, "far": is_outlier}
    return {id: {key: values[i].item() for key, values in scores.items()} for i, id in enumerate(ids)}


def _norm_of_similar(norms: Tensor, unit: Tensor) -> Tensor:
    """Return (clients,) the median norm of the others, weighted by the fourth power of their cosines."""
    weights = unit.clamp(min=0).square_().square_().add_(MIN_SIMILARITY_WEIGHT).fill_diagonal_(0)
    order = norms.argsort()
    cumulative_weights = weights.index_select(1, order).cumsum_(1)
    return norms[order[(cumulative_weights < weights.sum(1, keepdim=True) / 2).sum(1)]]
