"""What a data set is: before the encoder a table of pictures, after it a table of embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Strings = NDArray[np.str_]


class Source(Protocol):
    """Where the bytes of the pictures are: files, members of an archive, rows of an Arrow table."""

    def __len__(self) -> int: ...

    def name(self, row: int) -> str:
        """How a person finds this picture again."""
        ...

    def read(self, row: int) -> bytes:
        """The encoded picture (PNG, JPEG, ...), not decoded."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Pictures with labels. Empty strings mean that a column says nothing about a row."""

    name: str
    classes: tuple[str, ...]  # in the order of the label ids
    source: Source
    labels: NDArray[np.int64]  # (rows,)
    domains: Strings  # (rows,)
    clients: Strings  # (rows,) the data's own clients (writers, sites), or empty strings
    splits: Strings  # (rows,) "train", "validation", "test" where the data set says so, or empty
    templates: tuple[str, ...] = ("a picture of a {}",)


@dataclass(frozen=True)
class Embedded:
    """The same rows as a method's world sees them: unit-norm embeddings and no pictures."""

    name: str
    classes: tuple[str, ...]
    x: Tensor  # (rows, dim) float32, unit norm
    labels: NDArray[np.int64]  # (rows,)
    domains: Strings
    clients: Strings
    splits: Strings
    content: Sequence[str]  # (rows,) hex digests: equal digests are the same picture
    scale: float  # the encoder's logit scale (100 for released CLIP)
    text: Tensor | None  # (classes, dim) unit-norm class text embeddings, if the encoder has them
    patches: Tensor | None  # (rows, patches, dim) float16, memory-mapped, if asked for
    encoder: str  # the encoder's name and fingerprint
    fingerprint: str  # of the rows: pictures, labels, classes, templates
