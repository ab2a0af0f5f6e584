"""Sentences about the classes, through the text side of an encoder."""

import json
from dataclasses import replace
from hashlib import sha256

import torch
from torch import Tensor

from fedvlm.data.descriptions import Sentences, read_client_descriptions, read_common_descriptions
from fedvlm.data.table import EmbeddedTable
from fedvlm.encoders import fingerprint
from fedvlm.encoders.cache.folder import cache_directory, lock_entry
from fedvlm.encoders.interface import Encoder
from fedvlm.encoders.text import embed_sentences
from fedvlm.errors import SettingsError


def add_descriptions(rows: EmbeddedTable, encoder: Encoder, common_file: str, client_file: str) -> EmbeddedTable:
    """Rows with the embeddings of common descriptions, and of those that clients bring."""
    if not common_file and not client_file:
        return rows
    if "text" not in encoder.offers:
        raise SettingsError(
            f"{encoder.name} has no text, so descriptions are of no use; leave them out, or take an encoder with text"
        )
    common_sentences = read_common_descriptions(common_file, rows) if common_file else None
    brought = read_client_descriptions(client_file, rows.classes) if client_file else {}
    content = json.dumps([rows.fingerprint, common_sentences, brought], sort_keys=True)
    widest = max(
        (len(class_sentences) for client_sentences in brought.values() for class_sentences in client_sentences),
        default=0,
    )
    with lock_entry(cache_directory(), fingerprint(encoder), encoder.name) as (entry, _):
        table = entry.ensure_table("text.float32", "float32", (encoder.dim,))

        def embedded(sentences_by_class: Sentences, width: int) -> Tensor:
            flat = [sentence for class_sentences in sentences_by_class for sentence in class_sentences]
            out = torch.zeros(len(sentences_by_class), width, encoder.dim)
            if flat:
                parts = torch.split(
                    embed_sentences(encoder, table, flat),
                    [len(class_sentences) for class_sentences in sentences_by_class],
                )
                for place, part in zip(out, parts, strict=True):
                    place[: len(part)] = part
            return out

        return replace(
            rows,
            descriptions=embedded(common_sentences, max(map(len, common_sentences))) if common_sentences else None,
            texts={id: embedded(client_sentences, widest) for id, client_sentences in brought.items()},
            fingerprint=sha256(content.encode()).hexdigest(),
        )
