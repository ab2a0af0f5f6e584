"""Sentences about the classes, through the text side of an encoder."""

import json
from dataclasses import replace
from hashlib import sha256

import torch
from torch import Tensor

from fedvlm.data.descriptions import Sentences, read, read_own
from fedvlm.data.table import Embedded
from fedvlm.encoders import fingerprint
from fedvlm.encoders.cache.folder import directory, use
from fedvlm.encoders.interface import Encoder
from fedvlm.encoders.text import embeddings
from fedvlm.errors import SettingsError


def describe_rows(rows: Embedded, encoder: Encoder, common: str, own: str) -> Embedded:
    """Rows with the embeddings of common descriptions, and of those that clients bring."""
    if not common and not own:
        return rows
    if "text" not in encoder.offers:
        raise SettingsError(
            f"{encoder.name} has no text, so descriptions are of no use; leave them out, or take "
            "an encoder with text"
        )
    said = read(common, rows) if common else None
    brought = read_own(own, rows.classes) if own else {}
    content = json.dumps([rows.fingerprint, said, brought], sort_keys=True)
    widest = max((len(one) for many in brought.values() for one in many), default=0)
    with use(directory(), fingerprint(encoder), encoder.name) as (entry, _):
        table = entry.need("text.float32", "float32", (encoder.dim,))

        def embedded(many: Sentences, width: int) -> Tensor:
            flat = [sentence for one in many for sentence in one]
            out = torch.zeros(len(many), width, encoder.dim)
            if flat:
                parts = torch.split(embeddings(encoder, table, flat), [len(one) for one in many])
                for place, part in zip(out, parts, strict=True):
                    place[: len(part)] = part
            return out

        return replace(
            rows,
            descriptions=embedded(said, max(map(len, said))) if said else None,
            texts={id: embedded(many, widest) for id, many in brought.items()},
            fingerprint=sha256(content.encode()).hexdigest(),
        )
