"""The whole way of an upload: what the client does to it, and what the server makes of it."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from fedvlm import seeds, tensors
from fedvlm.channel import steps
from fedvlm.channel.outliers import MAX_EXACT_CLIENTS, UploadRound, bound_and_combine, outlier_scores, unchanged_without
from fedvlm.channel.settings import Channel, ChannelError
from fedvlm.channel.steps import (
    SCALE_SUFFIX,
    add_change_noise,
    apply_change,
    clip_change,
    dequantise_change,
    quantise_change,
    upload_change,
)
from fedvlm.channel.validation import UploadValidator, validate
from fedvlm.core import Method, Tensors, upload_sum
from fedvlm.errors import FederationError
from fedvlm.maths.privacy import Draw, seeded_normal
from fedvlm.parts.robust import WEIGHTS_FROM_DOTS

SPENT_KEY = "spent"  # Σ 1/z² over a client's rounds: all of them are one Gaussian mechanism of it
COUNTED_KEY = "counted"  # how many uploads that is
CHANNEL_PREFIX = "channel/"  # where a client's channel keeps its own among the local tensors
RESIDUAL_PREFIX = "left/"  # what rounding has left over


def encode(
    channel: Channel, upload: Tensors, sent: Tensors, channel_state: Tensors, draw: Draw
) -> tuple[Tensors, Tensors]:
    """At the client: the tensors that travel, and what its channel keeps for the next round.

    `draw` is the noise's: by seed in a simulation, from the system's entropy at a site.
    """
    if channel.clip and (integer_keys := [k for k, v in upload.items() if not v.is_floating_point()]):
        raise ChannelError(
            f"the upload holds whole numbers in {integer_keys[0]!r}, which can be neither clipped nor "
            "covered by noise; set channel.clip = 0, or choose another method"
        )
    if not (channel.clip or channel.quantise):
        return upload, channel_state
    change = upload_change(upload, sent)
    if channel.clip:
        change = clip_change(change, channel.clip)
    if channel.noise_multiplier:
        change = add_change_noise(change, channel.noise_multiplier * channel.clip, draw)
    if not channel.quantise:
        return apply_change(upload, sent, change), channel_state
    residuals = {
        key.removeprefix(RESIDUAL_PREFIX): value
        for key, value in channel_state.items()
        if key.startswith(RESIDUAL_PREFIX)
    }
    quantised, residuals = quantise_change(change, residuals)
    return {**upload, **quantised}, {
        **channel_state,
        **{RESIDUAL_PREFIX + key: value for key, value in residuals.items()},
    }


def join_channel_state(local: Tensors, channel_state: Tensors) -> Tensors:
    """A client's local tensors and what its channel keeps, to be stored in one place."""
    return {**local, **{CHANNEL_PREFIX + key: value for key, value in channel_state.items()}}


def split_channel_state(stored: Tensors) -> tuple[Tensors, Tensors]:
    channel_state = {
        key.removeprefix(CHANNEL_PREFIX): value for key, value in stored.items() if key.startswith(CHANNEL_PREFIX)
    }
    return {key: value for key, value in stored.items() if not key.startswith(CHANNEL_PREFIX)}, channel_state


def decode(channel: Channel, encoded: Tensors, sent: Tensors) -> Tensors:
    """At the server: the upload, from the tensors that travelled."""
    if not channel.quantise:
        return encoded
    keys = [key for key in encoded if key + SCALE_SUFFIX in encoded]
    scales = {key + SCALE_SUFFIX for key in keys}
    change = dequantise_change(encoded, keys)
    upload = {key: change.get(key, value) for key, value in encoded.items() if key not in scales}
    return apply_change(upload, sent, change)


def privacy_cost(channel: Channel, weights: Mapping[str, float]) -> dict[str, float]:
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


def spent_epsilon(channel: Channel, channel_states: Mapping[str, Tensors]) -> float:
    """ε at δ of the client that has spent most: its changes against none at all."""
    from fedvlm.maths.privacy import epsilon

    spent = max(
        (float(channel_state[SPENT_KEY]) for channel_state in channel_states.values() if SPENT_KEY in channel_state),
        default=0.0,
    )
    return epsilon(spent**-0.5, 1, delta=channel.delta) if spent else 0.0


def are_equal(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@dataclass(frozen=True)
class DecodedUploads:
    """One round's uploads as the aggregate gets them."""

    ids: Sequence[str]
    uploads: Sequence[Tensors]
    weights: torch.Tensor
    sizes: Mapping[str, int]  # bytes that travelled, by client
    channel_states: Mapping[str, Tensors]  # what the channel keeps, by client
    refused: Mapping[str, str] = field(default_factory=dict)  # whose upload is not used, and why
    outliers: Mapping[str, dict[str, float]] = field(default_factory=dict)  # how far from the others
    stored: Collection[str] = ()  # whose local tensors are where they belong
    # of uploads that are added up: clients with and without whom all others count as they came
    unchanged_without: frozenset[str] = frozenset()


class UploadPipeline:
    """Carries the uploads of one training."""

    def __init__(self, channel: Channel, method: Method, local: Sequence[str], seed: int) -> None:
        self.channel, self.upload_sum, self.seed = channel, upload_sum(method), seed
        self.releases: Mapping[str, int] = {}
        self.validator, self.ragged = UploadValidator(channel, local, method), method.traits.privacy.ragged_uploads
        self.method = method

    def run(
        self,
        number: int,
        uploads: Mapping[str, Tensors],
        sent: Mapping[str, Tensors],
        rows: Mapping[str, int],
        channel_states: Mapping[str, Tensors],
        encoded_ids: Collection[str],
        context_of: Callable[[str], str],
        total: Tensors | None = None,
        releases: Mapping[str, int] | None = None,
    ) -> DecodedUploads:
        """`passed` are the clients that did their half themselves: their uploads are `leave`'s, and
        one that does not fit is left out; that of a client in this process is a mistake.

        If only a `total` came, of SecAgg+, it is all there is. `releases` are how many uploads have
        left each client by its own count, also those that never arrived: each has cost as much.
        """
        self.releases = releases or {}
        after = {id: channel_states.get(id, {}) for id in uploads}
        if total is not None:
            return self._decode_sum(number, total, sent, rows, after, context_of(", ".join(uploads)))
        sizes, decoded, refused = {}, {}, {}

        @contextmanager
        def refusing(id: str) -> Iterator[None]:
            try:
                yield
            except ChannelError as error:
                if id not in encoded_ids:
                    raise FederationError(f"{context_of(id)}: {error}") from error
                refused[id] = f"{context_of(id)}: {error}"
            except Exception as error:
                if id not in encoded_ids:
                    raise
                is_explained = isinstance(error, FederationError)
                refused[id] = str(error) if is_explained else f"{context_of(id)}: its upload does not fit"

        for id, upload in uploads.items():
            with refusing(id):
                encoded = upload
                if id not in encoded_ids and not self.channel.is_off:
                    # where it is off, all there is to it is what the inbox looks at
                    validate(upload, self.validator.local_names, context_of(id))
                    noise_draw = seeded_normal(seeds.generator("channel noise", self.seed, id, number))
                    encoded, after[id] = encode(self.channel, upload, sent[id], after[id], noise_draw)
                decoded[id] = decode(self.channel, encoded, sent[id])
                sizes[id] = tensors.count_bytes(encoded)
        self.validator.find_majority(number, decoded, sent)
        for id in list(decoded):
            with refusing(id):
                self.validator.check(decoded[id], sent[id], rows[id], id, number, context_of(id))
        self.validator.last_sent = None  # it may be large
        decoded = {id: upload for id, upload in decoded.items() if id not in refused}
        ids = list(decoded)
        after = {id: after[id] for id in ids}
        weights = torch.tensor([float(rows[id]) for id in ids])
        new_states = self._add_privacy_cost(after, self._weights_in_sum(rows, [id for id in ids if uploads[id]]))
        decoded_round = DecodedUploads(ids, list(decoded.values()), weights, sizes, new_states, refused)
        if not any(uploads.values()):
            return decoded_round
        if not self.channel.secure:
            return self._compare(decoded_round, sent)
        masked, seed_parts = {}, (self.seed, number)
        for id, upload in decoded.items():
            if ragged_keys := [key for key in upload if key in self.ragged]:
                raise FederationError(
                    f"{context_of(id)}: {ragged_keys[0]!r} is each client's own and has no sum; set "
                    "channel.secure = false"
                )
            weighted_upload = steps.weight_upload(upload, self._weights_in_sum(rows, ids)[id], context_of(id))
            masked[id] = steps.mask_upload(
                steps.to_fixed_point(weighted_upload, len(ids), context_of(id)), ids, id, seed_parts
            )
        sizes = {id: tensors.count_bytes(upload) for id, upload in masked.items()}
        upload = steps.from_fixed_point(steps.sum_masked(masked.values()), str(self.upload_sum), decoded[ids[0]])
        return DecodedUploads(["everyone"], [upload], weights.sum(0, keepdim=True), sizes, new_states, refused)

    def _compare(self, decoded_round: DecodedUploads, sent: Mapping[str, Tensors]) -> DecodedUploads:
        """Says who is far from the rest; bound and combined by a robust rule, where asked."""
        if self.upload_sum is None or len({tuple(entry) for entry in decoded_round.uploads}) > 1:
            return decoded_round
        sent_tensors = [sent[id] for id in decoded_round.ids]
        upload_round = UploadRound(
            self.method, self.upload_sum, decoded_round.uploads, sent_tensors, decoded_round.weights
        )
        is_exact = len(sent_tensors) <= MAX_EXACT_CLIENTS or self.channel.aggregation in WEIGHTS_FROM_DOTS
        dots = upload_round.dots() if is_exact else upload_round.approximate_dots()
        ids, uploads, weights = bound_and_combine(self.channel, upload_round, decoded_round.ids, dots)
        outliers = outlier_scores(decoded_round.ids, dots)
        unchanged: frozenset[str] = frozenset()
        if self.upload_sum == "total" and self.channel.aggregation == "mean":
            median = self.channel.bound == "median"
            is_unchanged = unchanged_without(upload_round, dots) if median else [True] * len(decoded_round.ids)
            unchanged = frozenset(id for id, entry in zip(decoded_round.ids, is_unchanged, strict=True) if entry)
        return replace(
            decoded_round, ids=ids, uploads=uploads, weights=weights, outliers=outliers, unchanged_without=unchanged
        )

    def _decode_sum(
        self,
        number: int,
        total: Tensors,
        sent: Mapping[str, Tensors],
        rows: Mapping[str, int],
        channel_states: Mapping[str, Tensors],
        context: str,
    ) -> DecodedUploads:
        first = sent[min(sent)]
        if any(not are_equal(first, upload) for upload in sent.values()):
            raise FederationError(f"{context}: not all were sent the same, so there is no sum of it")
        upload = steps.from_secagg(total, first, self.channel, context)
        validate(upload, (), context)
        size = tensors.count_bytes(total)  # as many numbers, of 8 bytes, come from each client
        weights = torch.tensor([float(sum(rows[id] for id in channel_states))])
        new_states = self._add_privacy_cost(channel_states, self._weights_in_sum(rows, list(channel_states)))
        return DecodedUploads(["everyone"], [upload], weights, dict.fromkeys(channel_states, size), new_states)

    def _add_privacy_cost(
        self, channel_states: Mapping[str, Tensors], weights: Mapping[str, float]
    ) -> dict[str, Tensors]:
        """What the channel keeps, with this round's cost of privacy added."""
        after = dict(channel_states)
        for id, cost in privacy_cost(self.channel, weights).items():
            before = after[id].get(SPENT_KEY, torch.zeros((), dtype=torch.float64))
            counted = int(after[id].get(COUNTED_KEY, 0))
            count = max(1, self.releases.get(id, 0) - counted)
            after[id] = {**after[id], SPENT_KEY: before + cost * count}
            if self.releases.get(id):
                after[id][COUNTED_KEY] = torch.tensor(counted + count)
        return {id: channel_state for id, channel_state in after.items() if channel_state}

    def _weights_in_sum(self, rows: Mapping[str, int], ids: Sequence[str]) -> dict[str, float]:
        """How much of the sum a client's upload is."""
        return {id: float(rows[id]) if self.upload_sum == "samples" else 1.0 for id in ids}
