"""Refuse an upload that is not what the method sends, before it reaches the aggregate."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from fedvlm.channel.settings import Channel
from fedvlm.channel.steps import change_norm, max_change_norm, upload_change
from fedvlm.core import UPLOAD_SUMS, Method, Tensors
from fedvlm.errors import FederationError

Schema = Mapping[str, str]


def check_upload(upload: Tensors, local_names: Collection[str], context: str) -> None:
    """Refuse local tensors and values that are not finite; `context` names method, client and round."""
    for key, value in upload.items():
        if key in local_names:
            raise FederationError(f"{context}: the upload holds {key!r}, which is local; remove it")
        if value.is_floating_point() and not value.isfinite().all():
            raise FederationError(
                f"{context}: {int((~value.isfinite()).sum())} of {value.numel()} numbers of {key!r} "
                "are not finite; lower the learning rate, or check this client's samples"
            )


def tensor_schema(tensors: Tensors) -> Schema:
    return {key: _describe_tensor(value.dtype, value.shape) for key, value in sorted(tensors.items())}


@lru_cache(maxsize=1024)
def _describe_tensor(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def check_sample_count(count: Any, channel: Channel, context: str) -> int:
    """Return a client's number of samples; refuse one that no client has, which would own the mean."""
    if type(count) is not int or not 0 <= count <= channel.max_samples:
        raise FederationError(
            f"{context}: it reports {count!r} training samples; it must be an integer from 0 to {channel.max_samples} "
            "(channel.max_samples)"
        )
    return count


@dataclass
class UploadValidator:
    """Check the uploads of one training against each other and against what was sent."""

    channel: Channel
    local_names: Collection[str]  # of tensors that may never arrive
    method: Method | None = None
    sample_counts: dict[str, int] = field(default_factory=dict)  # as each client reported the first time
    uploaded: set[str] = field(default_factory=set)  # clients whose upload of this round has come
    round: int = -1
    majority: dict[str, tuple[str, Schema]] = field(default_factory=dict)
    last_sent: tuple[Tensors, Schema, str] | None = None  # most clients are sent the same

    def __post_init__(self) -> None:  # once, not for every upload
        self.ragged = self.method.traits.privacy.ragged_uploads if self.method else frozenset[str]()
        kind = UPLOAD_SUMS.get(type(self.method).aggregate) if self.method else None
        self.averages_sent = kind in ("samples", "clients")  # the standard means are of all that was sent

    def _schema_of_sent(self, sent: Tensors) -> tuple[Schema, str]:
        """Return the schema of what was sent, and a text that identifies it."""
        if self.last_sent is None or self.last_sent[0] is not sent:
            sent_schema = tensor_schema(sent)
            self.last_sent = sent, sent_schema, str(sent_schema)
        return self.last_sent[1:]

    def _start_round(self, number: int) -> None:
        if number != self.round:
            self.round = number
            self.majority.clear()
            self.uploaded.clear()

    def find_majority(self, number: int, uploads: Mapping[str, Tensors], sent: Mapping[str, Tensors]) -> None:
        """Find the schema that most clients upload which were sent the same; in a tie, one like what was sent."""
        self._start_round(number)
        groups: dict[str, dict[str, Schema]] = {}
        for id in sorted(uploads):
            groups.setdefault(self._schema_of_sent(sent[id])[1], {})[id] = self._schema_without_ragged(uploads[id])
        for sent_key, schemas in groups.items():
            schema_texts = {id: str(upload_schema) for id, upload_schema in schemas.items()}
            votes = Counter(schema_texts.values())
            representatives = {schema_texts[id]: id for id in reversed(schema_texts)}  # one for each schema
            sent_items = tensor_schema(sent[min(schemas)]).items()
            ranks = {id: (votes[text], -len(schemas[id].items() ^ sent_items)) for text, id in representatives.items()}
            best = max(sorted(ranks), key=ranks.__getitem__)
            self.majority[sent_key] = (best, schemas[best])

    def _schema_without_ragged(self, upload: Tensors) -> Schema:
        return {key: value for key, value in tensor_schema(upload).items() if key not in self.ragged}

    def check(self, upload: Tensors, sent: Tensors, count: Any, client: str, number: int, context: str) -> None:
        """Refuse what no sound client uploads, and a second upload in the same round."""
        self._start_round(number)
        if client in self.uploaded:
            raise FederationError(f"{context}: an upload of this round has come already; it counts once")
        check_upload(upload, self.local_names, context)
        self._check_like_others(upload, sent, client, context)
        self._check_sample_count(count, client, context)
        n_values = sum(value.numel() for value in upload.values() if value.is_floating_point())
        max_norm = max_change_norm(self.channel, n_values)
        if max_norm < float("inf") and (change_length := change_norm(upload_change(upload, sent))) > max_norm:
            raise FederationError(
                f"{context}: its change has the norm {change_length:.4g}, more than {max_norm:.4g}, the largest "
                "that the channel allows; it is not used"
            )
        self.uploaded.add(client)

    def _check_like_others(self, upload: Tensors, sent: Tensors, client: str, context: str) -> None:
        """Clients that are sent the same upload the same; a mean is of what was sent."""
        (sent_schema, sent_key), upload_schema = self._schema_of_sent(sent), self._schema_without_ragged(upload)
        majority_client, majority_schema = self.majority.setdefault(sent_key, (client, upload_schema))
        _check_schema(upload_schema, majority_schema, f"client {majority_client}'s", context)
        if self.averages_sent and upload_schema and upload_schema != sent_schema:
            _check_schema(upload_schema, {**upload_schema, **sent_schema}, "what was sent", context)

    def _check_sample_count(self, count: Any, client: str, context: str) -> None:
        check_sample_count(count, self.channel, context)
        if self.sample_counts.setdefault(client, count) != count:
            raise FederationError(
                f"{context}: it reports {count} training samples, but reported {self.sample_counts[client]} before"
            )


def _check_schema(upload_schema: Schema, expected: Schema, owner: str, context: str) -> None:
    for key in sorted(upload_schema.keys() | expected.keys()) if upload_schema != expected else ():
        if upload_schema.get(key) != expected.get(key):
            raise FederationError(
                f"{context}: {key!r} of its upload is {upload_schema.get(key, 'missing')}, but "
                f"{expected.get(key, 'missing')} in {owner}; it runs another version or "
                "other settings"
            )
