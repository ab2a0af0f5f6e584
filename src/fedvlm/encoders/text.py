"""Class names to sentences, and sentences to one text embedding per class."""

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.data.table import clean
from fedvlm.encoders.cache.table import RowFile
from fedvlm.encoders.interface import Encoder
from fedvlm.errors import EncoderError, SettingsError

SENTENCES = 256  # given to an encoder at once


def sentences(classes: Sequence[str], template: str) -> list[str]:
    """The cleaned class names put into a template such as "an image of a {}"."""
    if "{}" not in template:
        raise SettingsError(f"the template {template!r} has no place for a class; write {{}} in it")
    return [template.replace("{}", clean(name)) for name in classes]


def class_embeddings(
    encoder: Encoder, table: RowFile, classes: Sequence[str], templates: Sequence[str]
) -> Tensor:
    """(classes, dim) unit norm; several templates give the mean of their unit vectors."""
    many = [embeddings(encoder, table, sentences(classes, one)) for one in templates]
    return normalize(torch.stack(many).mean(0), dim=-1)


def embeddings(encoder: Encoder, table: RowFile, said: Sequence[str]) -> Tensor:
    """(sentences, dim) unit norm, each sentence embedded once and kept in the table."""
    digests = [sha256(one.encode()).digest() for one in said]
    text = dict(zip(digests, said, strict=True))
    missing = [digest for digest in text if digest not in table]
    for start in range(0, len(missing), SENTENCES):
        some = missing[start : start + SENTENCES]
        vectors = encoder.embed_text([text[digest] for digest in some]).detach().float().cpu()
        sound = vectors.ndim == 2 and bool(vectors.isfinite().all() and vectors.any(1).all())
        if vectors.shape != (len(some), encoder.dim) or not sound:
            raise EncoderError(
                f"{encoder.name} answered {len(some)} sentences with shape {tuple(vectors.shape)}, "
                f"or with NaN, inf or zero vectors; it should give {encoder.dim} numbers for each"
            )
        table.append(some, vectors.numpy())
    return normalize(torch.from_numpy(table.read(digests)), dim=-1)
