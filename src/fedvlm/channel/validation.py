"""Refuses an upload that is not what the method sends, before it reaches the aggregate."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from fedvlm.channel.settings import Channel
from fedvlm.channel.steps import change_norm, max_change_norm, upload_change
from fedvlm.core import Method, Tensors, upload_sum
from fedvlm.errors import FederationError

Schema = Mapping[str, str]


def validate(upload: Tensors, local: Collection[str], context: str) -> None:
    """`where` names method, client and round."""
    for key, value in upload.items():
        if key in local:
            raise FederationError(f"{context}: the upload holds {key!r}, which is local; remove it")
        if value.is_floating_point() and not value.isfinite().all():
            raise FederationError(
                f"{context}: {int((~value.isfinite()).sum())} of {value.numel()} numbers of {key!r} "
                "are not finite; lower the rate, or look at this client's rows"
            )


def tensor_schema(tensors: Tensors) -> Schema:
    return {key: _describe_tensor(value.dtype, value.shape) for key, value in sorted(tensors.items())}


@lru_cache(maxsize=1024)
def _describe_tensor(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def check_sample_count(rows: Any, channel: Channel, context: str) -> int:
    """A row count that a client said, unless nobody has as many: it would own the mean."""
    if type(rows) is not int or not 0 <= rows <= channel.max_samples:
        raise FederationError(
            f"{context}: it says it has {rows!r} training rows; between 0 and {channel.max_samples} "
            "(channel.max_samples) are believed"
        )
    return rows


@dataclass
class UploadValidator:
    """The server's view of one training: what was expected, what has come, and from whom."""

    channel: Channel
    local_names: Collection[str]  # names that may never arrive
    method: Method | None = None
    sample_counts: dict[str, int] = field(default_factory=dict)  # as each client said the first time
    uploaded: set[str] = field(default_factory=set)  # clients whose upload of this round has come
    round: int = -1
    majority: dict[str, tuple[str, Schema]] = field(default_factory=dict)
    last_sent: tuple[Tensors, Schema, str] | None = None  # all may be sent the same

    def __post_init__(self) -> None:  # once, not for every upload
        self.ragged = self.method.traits.privacy.ragged_uploads if self.method else frozenset[str]()
        self.upload_sum = upload_sum(self.method) if self.method else None

    def _schema_of_sent(self, sent: Tensors) -> tuple[Schema, str]:
        """What was sent, and the same in one word."""
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
        """Of those who were sent the same, the others are compared with what most of them upload;
        where as many upload one thing as another, with what is most like what was sent."""
        self._start_round(number)
        groups: dict[str, dict[str, Schema]] = {}
        for id in sorted(uploads):
            groups.setdefault(self._schema_of_sent(sent[id])[1], {})[id] = self._schema_without_ragged(uploads[id])
        for sent_key, schemas in groups.items():
            schema_texts = {id: str(upload_schema) for id, upload_schema in schemas.items()}
            votes = Counter(schema_texts.values())
            representatives = {
                schema_texts[id]: id for id in reversed(schema_texts)
            }  # one stands for all that are alike
            sent_items = tensor_schema(sent[min(schemas)]).items()

            def rank(id: str, schemas: Any = schemas, votes: Any = votes, sent_items: Any = sent_items) -> Any:
                return votes[str(schemas[id])], -len(schemas[id].items() ^ sent_items)

            best = max(sorted(representatives.values()), key=rank)
            self.majority[sent_key] = (best, schemas[best])

    def _schema_without_ragged(self, upload: Tensors) -> Schema:
        return {key: value for key, value in tensor_schema(upload).items() if key not in self.ragged}

    def check(self, upload: Tensors, sent: Tensors, rows: Any, client: str, number: int, context: str) -> None:
        """Refuses what no sound client uploads, and a second upload in the same round."""
        self._start_round(number)
        if client in self.uploaded:
            raise FederationError(f"{context}: an upload of this round has come already; it counts once")
        validate(upload, self.local_names, context)
        self._check_like_others(upload, sent, client, context)
        self._check_sample_count(rows, client, context)
        n_values = sum(value.numel() for value in upload.values() if value.is_floating_point())
        max_norm = max_change_norm(self.channel, n_values)
        if max_norm < float("inf") and (change_length := change_norm(upload_change(upload, sent))) > max_norm:
            raise FederationError(
                f"{context}: its change has the norm {change_length:.4g}, more than {max_norm:.4g}, the largest "
                "that the channel allows; it is not used"
            )
        self.uploaded.add(client)

    def _check_like_others(self, upload: Tensors, sent: Tensors, client: str, context: str) -> None:
        """Who is sent the same uploads the same; a mean is of what was sent."""
        (sent_schema, sent_key), upload_schema = self._schema_of_sent(sent), self._schema_without_ragged(upload)
        majority_client, majority_schema = self.majority.setdefault(sent_key, (client, upload_schema))
        _check_schema(upload_schema, majority_schema, f"client {majority_client}'s", context)
        if self.upload_sum in ("samples", "clients") and upload_schema and upload_schema != sent_schema:
            _check_schema(upload_schema, {**upload_schema, **sent_schema}, "what was sent", context)

    def _check_sample_count(self, rows: Any, client: str, context: str) -> None:
        check_sample_count(rows, self.channel, context)
        if self.sample_counts.setdefault(client, rows) != rows:
            raise FederationError(
                f"{context}: it says it has {rows} training rows, but said {self.sample_counts[client]} before"
            )


def _check_schema(upload_schema: Schema, expected: Schema, owner: str, context: str) -> None:
    for key in sorted(upload_schema.keys() | expected.keys()) if upload_schema != expected else ():
        if upload_schema.get(key) != expected.get(key):
            raise FederationError(
                f"{context}: {key!r} of its upload is {upload_schema.get(key, 'missing')}, but "
                f"{expected.get(key, 'missing')} in {owner}; it runs another version or "
                "other settings"
            )
