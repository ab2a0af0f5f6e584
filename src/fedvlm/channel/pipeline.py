"""What an upload goes through: the pipeline at the client, and what the server makes of a round's uploads."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedvlm import seeds, tensors
from fedvlm.channel import steps
from fedvlm.channel.outliers import MAX_EXACT_CLIENTS, UploadRound, bound_and_combine, outlier_scores, unchanged_without
from fedvlm.channel.settings import Channel, ChannelError
from fedvlm.channel.validation import UploadValidator, check_upload
from fedvlm.channel.verified import sum_uploads
from fedvlm.core import Method, Tensors, upload_sum
from fedvlm.errors import FederationError
from fedvlm.maths.privacy import Draw, epsilon, seeded_normal
from fedvlm.parts.robust import WEIGHTS_FROM_DOTS

SPENT_KEY = "spent"  # Σ 1/z² over a client's rounds: together they are one Gaussian mechanism of that cost
COUNTED_KEY = "counted"  # how many uploads that is
CHANNEL_PREFIX = "channel/"  # of a client's channel state, where it is stored with the local tensors
EVERYONE = "everyone"  # the client that stands for all in a sum


class UploadPipeline:
    """The steps of a channel in their order: `encode` at the client, `decode` at the server."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.steps = channel, steps.client_steps(channel)

    def encode(self, upload: Tensors, sent: Tensors, state: Tensors, draw: Draw) -> tuple[Tensors, Tensors]:
        """Return the tensors that travel, and the channel state that the client keeps for the next round.

        `draw` gives the noise: by seed in a simulation, from the system's entropy at a site.
        """
        if self.channel.clip and (integers := [key for key in upload if not upload[key].is_floating_point()]):
            raise ChannelError(
                f"the upload holds integers in {integers[0]!r}, which can neither be clipped nor get noise; "
                "set channel.clip = 0, or choose another method"
            )
        if not self.steps:
            return upload, state
        change = steps.upload_change(upload, sent)
        for step in self.steps:
            change, state = step.encode(change, state, draw)
        return {**upload, **change} if self.channel.quantise else steps.apply_change(upload, sent, change), state

    def decode(self, encoded: Tensors, sent: Tensors) -> Tensors:
        """Return the upload from the tensors that travelled."""
        if not self.channel.quantise:
            return encoded
        change = {key: value for key, value in encoded.items() if key + steps.SCALE_SUFFIX in encoded}
        scales = {key + steps.SCALE_SUFFIX for key in change}
        change |= {key: encoded[key] for key in scales}
        for step in reversed(self.steps):
            change = step.decode(change)
        upload = {key: change.get(key, value) for key, value in encoded.items() if key not in scales}
        return steps.apply_change(upload, sent, change)

    def cost(self, ids: Iterable[str]) -> dict[str, float]:
        """Return a round's cost for each client as 1/z²; in a sum, nobody knows that the others add their noise."""
        if not self.channel.noise_multiplier:
            return {}
        return dict.fromkeys(ids, sum(step.cost() for step in self.steps))


def join_channel_state(local: Tensors, channel_state: Tensors) -> Tensors:
    """Return a client's local tensors and its channel state, to be stored in one place."""
    return {**local, **{CHANNEL_PREFIX + key: value for key, value in channel_state.items()}}


def split_channel_state(stored: Tensors) -> tuple[Tensors, Tensors]:
    """Return a client's local tensors and its channel state, from where both are stored."""
    keys = [key for key in stored if key.startswith(CHANNEL_PREFIX)]
    local = {key: value for key, value in stored.items() if key not in keys}
    return local, {key.removeprefix(CHANNEL_PREFIX): stored[key] for key in keys}


def spent_epsilon(channel: Channel, channel_states: Mapping[str, Tensors]) -> float:
    """Return ε at δ of the client that has spent most: its changes against no change at all."""
    spent = max((float(state[SPENT_KEY]) for state in channel_states.values() if SPENT_KEY in state), default=0.0)
    return epsilon(spent**-0.5, 1, delta=channel.delta) if spent else 0.0


def are_equal(a: Tensors, b: Tensors) -> bool:
    """Tell whether two dicts hold the same tensors."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def sum_bytes(upload: Tensors) -> int:
    """Return the bytes of a masked upload: 8 for each number and for its weight."""
    return 8 * (1 + sum(value.numel() for value in upload.values()))


@dataclass(frozen=True)
class ReceivedUploads:
    """One round's uploads as they come to the server."""

    round: int
    uploads: Mapping[str, Tensors]
    sent: Mapping[str, Tensors]  # what each client was sent
    sample_counts: Mapping[str, int]
    channel_states: Mapping[str, Tensors] = field(default_factory=dict)
    # Clients on other machines have encoded their uploads: a faulty one is left out. In this process it is an error.
    encoded_ids: Collection[str] = ()
    context_of: Callable[[str], str] = str  # names method, client and round in an error
    decoded_sum: Tensors | None = None  # all that came of the uploads, if other machines have summed them
    # Uploads that have left each client by its own count, also those that never arrived: each has cost as much.
    releases: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DecodedUploads:
    """One round's uploads as the aggregate gets them."""

    ids: Sequence[str]
    uploads: Sequence[Tensors]
    weights: Tensor
    sizes: Mapping[str, int]  # bytes that travelled, by client
    channel_states: Mapping[str, Tensors]  # what each client's channel keeps
    refused: Mapping[str, str] = field(default_factory=dict)  # whose upload is not used, and why
    outliers: Mapping[str, dict[str, float]] = field(default_factory=dict)  # each client's distance to the others
    stored: Collection[str] = ()  # clients whose local tensors are stored already
    contributors: Sequence[str] = ()  # clients whose uploads are in a sum or mean; none: each of `ids` has its own
    # of uploads that are added up: clients with and without whom all others count as they came
    unchanged_without: frozenset[str] = frozenset()


class UploadReceiver:
    """Decodes, validates, compares and sums the uploads of one training, round by round."""

    def __init__(self, channel: Channel, method: Method, local_names: Sequence[str], seed: int) -> None:
        self.channel, self.method, self.seed = channel, method, seed
        self.pipeline, self.upload_sum = UploadPipeline(channel), upload_sum(method)
        self.validator = UploadValidator(channel, local_names, method)

    def receive(self, received: ReceivedUploads) -> DecodedUploads:
        """Return the uploads that the aggregate may use, or the sum of them."""
        if received.decoded_sum is not None:
            return self._use_sum(received, received.decoded_sum)
        states = {id: received.channel_states.get(id, {}) for id in received.uploads}
        sizes, decoded = {}, {}
        refused: dict[str, str] = {}
        for id, upload in received.uploads.items():
            with _refuse_faulty(received, id, refused):
                encoded = upload
                if id not in received.encoded_ids and not self.channel.is_off:
                    check_upload(upload, self.validator.local_names, received.context_of(id))
                    draw = seeded_normal(seeds.generator("channel noise", self.seed, id, received.round))
                    encoded, states[id] = self.pipeline.encode(upload, received.sent[id], states[id], draw)
                decoded[id] = self.pipeline.decode(encoded, received.sent[id])
                sizes[id] = tensors.count_bytes(encoded)
        self._validate(received, decoded, refused)
        uploads = {id: upload for id, upload in decoded.items() if id not in refused}
        weights = torch.tensor([float(received.sample_counts[id]) for id in uploads])
        uploaders = [id for id in uploads if received.uploads[id]]
        new_states = self._add_cost({id: states[id] for id in uploads}, received, uploaders)
        result = DecodedUploads(list(uploads), list(uploads.values()), weights, sizes, new_states, refused)
        if not uploaders:
            return result
        return self._sum(received, result, uploads) if self.channel.verified else self._compare(result, received.sent)

    def _validate(self, received: ReceivedUploads, decoded: Mapping[str, Tensors], refused: dict[str, str]) -> None:
        self.validator.find_majority(received.round, decoded, received.sent)
        for id, upload in decoded.items():
            with _refuse_faulty(received, id, refused):
                count, context = received.sample_counts[id], received.context_of(id)
                self.validator.check(upload, received.sent[id], count, id, received.round, context)
        self.validator.last_sent = None  # it may be large

    def _sum(
        self, received: ReceivedUploads, decoded: DecodedUploads, uploads: Mapping[str, Tensors]
    ) -> DecodedUploads:
        """Return the verified sum in place of the uploads."""
        for id, upload in uploads.items():
            if ragged := [key for key in upload if key in self.method.traits.privacy.ragged_uploads]:
                raise FederationError(
                    f"{received.context_of(id)}: {ragged[0]!r} has another shape at each client, so there is no sum "
                    "of it; set channel.verified = false"
                )
        weights = self._weights_in_sum(received, list(uploads))
        total = sum_uploads(uploads, weights, self.upload_sum == "total", received.context_of)
        sizes = {id: sum_bytes(upload) for id, upload in uploads.items()}
        weight = decoded.weights.sum(0, keepdim=True)
        return replace(
            decoded, ids=[EVERYONE], uploads=[total], weights=weight, sizes=sizes, contributors=list(uploads)
        )

    def _compare(self, decoded: DecodedUploads, sent: Mapping[str, Tensors]) -> DecodedUploads:
        """Find outliers; bound the uploads and combine them by a robust rule, if the channel does."""
        if self.upload_sum is None or len({tuple(upload) for upload in decoded.uploads}) > 1:
            return decoded
        sent_tensors = [sent[id] for id in decoded.ids]
        upload_round = UploadRound(self.method, self.upload_sum, decoded.uploads, sent_tensors, decoded.weights)
        is_exact = len(sent_tensors) <= MAX_EXACT_CLIENTS or self.channel.aggregation in WEIGHTS_FROM_DOTS
        dots = upload_round.dots() if is_exact else upload_round.approximate_dots()
        ids, uploads, weights = bound_and_combine(self.channel, upload_round, decoded.ids, dots)
        unchanged: frozenset[str] = frozenset()
        if self.upload_sum == "total" and self.channel.aggregation == "mean":
            is_bound = self.channel.bound == "median"
            is_unchanged = unchanged_without(upload_round, dots) if is_bound else [True] * len(decoded.ids)
            unchanged = frozenset(id for id, flag in zip(decoded.ids, is_unchanged, strict=True) if flag)
        outliers, contributors = outlier_scores(decoded.ids, dots), () if ids == decoded.ids else decoded.ids
        decoded = replace(decoded, ids=ids, uploads=uploads, weights=weights, contributors=contributors)
        return replace(decoded, outliers=outliers, unchanged_without=unchanged)

    def _use_sum(self, received: ReceivedUploads, upload: Tensors) -> DecodedUploads:
        """Return the one upload that other machines made of all."""
        ids = list(received.uploads)
        check_upload(upload, (), received.context_of(", ".join(ids)))
        weights = torch.tensor([float(sum(received.sample_counts[id] for id in ids))])
        states = self._add_cost({id: received.channel_states.get(id, {}) for id in ids}, received, ids)
        return DecodedUploads(
            [EVERYONE], [upload], weights, dict.fromkeys(ids, sum_bytes(upload)), states, contributors=ids
        )

    def _add_cost(
        self, channel_states: Mapping[str, Tensors], received: ReceivedUploads, uploaders: Sequence[str]
    ) -> dict[str, Tensors]:
        """Return the channel states with this round's privacy cost added."""
        states = dict(channel_states)
        for id, cost in self.pipeline.cost(uploaders).items():
            spent = states[id].get(SPENT_KEY, torch.zeros((), dtype=torch.float64))
            counted = int(states[id].get(COUNTED_KEY, 0))
            count = max(1, received.releases.get(id, 0) - counted)
            states[id] = {**states[id], SPENT_KEY: spent + cost * count}
            if received.releases.get(id):
                states[id][COUNTED_KEY] = torch.tensor(counted + count)
        return {id: state for id, state in states.items() if state}

    def _weights_in_sum(self, received: ReceivedUploads, ids: Sequence[str]) -> dict[str, float]:
        return {id: float(received.sample_counts[id]) if self.upload_sum == "samples" else 1.0 for id in ids}


@contextmanager
def _refuse_faulty(received: ReceivedUploads, id: str, refused: dict[str, str]) -> Iterator[None]:
    """Note why an upload of another machine cannot be used; one of this process is an error."""
    try:
        yield
    except ChannelError as error:
        if id not in received.encoded_ids:
            raise FederationError(f"{received.context_of(id)}: {error}") from error
        refused[id] = f"{received.context_of(id)}: {error}"
    except Exception as error:
        if id not in received.encoded_ids:
            raise
        is_explained = isinstance(error, FederationError)
        refused[id] = str(error) if is_explained else f"{received.context_of(id)}: its upload does not fit"
