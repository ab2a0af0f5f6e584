"""Text embeddings: of class names in templates, and of descriptions of the classes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.data.descriptions import Sentences, read_client_descriptions, read_common_descriptions
from fedvlm.data.table import EmbeddedTable, readable_name
from fedvlm.encoders import Encoder, fingerprint
from fedvlm.encoders.cache import cache_directory, lock_entry
from fedvlm.encoders.cache.rows import RowFile
from fedvlm.errors import EncoderError, SettingsError
from fedvlm.maths.text_tower import count_common_prefix, suffixes

SENTENCES_PER_BATCH = 256  # given to an encoder at once


def fill_template(classes: Sequence[str], template: str) -> list[str]:
    """Insert the readable class names into a template such as "a picture of a {}"."""
    if "{}" not in template:
        raise SettingsError(f"the template {template!r} has no place for a class; write {{}} in it")
    return [template.replace("{}", readable_name(name)) for name in classes]


Tokens = Sequence[Sequence[int]]


def tokenize_classes(
    tokenize: Callable[[Sequence[str]], Tokens], classes: Sequence[str], template: str
) -> tuple[Tokens, int]:
    """Tokenise the sentence of each class; return the tokens and how many precede the class name."""
    # Complete sentences, because a tokenizer may merge a name with the word before it.
    tokens = tokenize(fill_template(classes, template))  # SOS ... EOT each
    (before,) = tokenize([template.split("{}")[0]])
    return tokens, count_common_prefix([before[:-1], *tokens])


def text_tower_inputs(tokens: Tokens, cut: int, table: Tensor) -> dict[str, Any]:
    """Return the arguments of a TextTower for sentences with a common prefix."""
    tails, ends = suffixes([row[cut:-1] for row in tokens], tokens[0][-1], table)
    prefix = table[list(tokens[0][1:cut])]
    return {"start": table[tokens[0][0]], "prefix": prefix, "suffixes": tails, "ends": ends}


def load_tokenizer(file: Path, remedy: str) -> Any:
    """Load a tokenizer.json, without padding and truncation."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise EncoderError(f"{file} cannot be read ({error}); {remedy}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def check_length(name: str, texts: Sequence[str], tokens: Tokens, room: int) -> None:
    for sentence, row in zip(texts, tokens, strict=True):
        if len(row) > room:
            raise SettingsError(f"{sentence!r} has {len(row)} tokens, {name} reads {room}; shorten it")


def weights_hash(weights: Mapping[str, Any]) -> str:
    """Digest names, shapes and values of weights, whatever files they came from."""
    digest = sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def class_embeddings(encoder: Encoder, table: RowFile, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """(classes, dim) embed the class names; several templates are averaged as unit vectors."""
    per_template = [embed_sentences(encoder, table, fill_template(classes, template)) for template in templates]
    return normalize(torch.stack(per_template).mean(0), dim=-1)


def embed_sentences(encoder: Encoder, table: RowFile, texts: Sequence[str]) -> Tensor:
    """(sentences, dim) embed sentences, each only once: embeddings are kept in the table."""
    digests = [sha256(sentence.encode()).digest() for sentence in texts]
    text = dict(zip(digests, texts, strict=True))
    missing = [digest for digest in text if digest not in table]
    for start in range(0, len(missing), SENTENCES_PER_BATCH):
        some = missing[start : start + SENTENCES_PER_BATCH]
        vectors = encoder.embed_text([text[digest] for digest in some]).detach().float().cpu()
        sound = vectors.ndim == 2 and bool(vectors.isfinite().all() and vectors.any(1).all())
        if vectors.shape != (len(some), encoder.dim) or not sound:
            problem = f"shape {tuple(vectors.shape)} for {len(some)} sentences, or NaN, infinite or zero vectors"
            raise EncoderError(f"{encoder.name} returned {problem}; it must return {encoder.dim} numbers for each")
        table.append(some, vectors.numpy())
    return normalize(torch.from_numpy(table.read(digests)), dim=-1)


def add_descriptions(rows: EmbeddedTable, encoder: Encoder, common_file: str, client_file: str) -> EmbeddedTable:
    """Add the embeddings of common descriptions, and of those that clients provide."""
    if not common_file and not client_file:
        return rows
    if "text" not in encoder.offers:
        raise SettingsError(f"{encoder.name} cannot embed descriptions, because it has no text tower; leave them out")
    common_sentences = read_common_descriptions(common_file, rows) if common_file else None
    brought = read_client_descriptions(client_file, rows.classes) if client_file else {}
    content = json.dumps([rows.fingerprint, common_sentences, brought], sort_keys=True)
    widest = max((len(sentences) for by_class in brought.values() for sentences in by_class), default=0)
    with lock_entry(cache_directory(), fingerprint(encoder), encoder.name) as (entry, _):
        table = entry.ensure_table("text.float32", "float32", (encoder.dim,))

        def embedded(sentences_by_class: Sentences, width: int) -> Tensor:
            flat = [sentence for class_sentences in sentences_by_class for sentence in class_sentences]
            out = torch.zeros(len(sentences_by_class), width, encoder.dim)
            if flat:
                parts = torch.split(embed_sentences(encoder, table, flat), [*map(len, sentences_by_class)])
                for place, part in zip(out, parts, strict=True):
                    place[: len(part)] = part
            return out

        return replace(
            rows,
            descriptions=embedded(common_sentences, max(map(len, common_sentences))) if common_sentences else None,
            texts={id: embedded(client_sentences, widest) for id, client_sentences in brought.items()},
            fingerprint=sha256(content.encode()).hexdigest(),
        )
