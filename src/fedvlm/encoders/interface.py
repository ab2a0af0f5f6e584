"""What every encoder offers, whoever owns its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

if TYPE_CHECKING:  # decoder processes import this module and have no use for torch
    from torch import Tensor

BATCH = 32  # images given to an encoder at once, unless it says otherwise (`batch`)


class Preprocess(Protocol):
    """From a decoded RGB image to the array the encoder takes; pickled to decoder processes."""

    def __call__(self, image: Image) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Vectors:
    """What an encoder answers for a batch of images; lengths are as the encoder gave them."""

    pooled: NDArray[np.float32]  # (images, dim)
    patches: NDArray[np.float16] | None  # (images, patches, dim) through final norm and projection


class Encoder(Protocol):
    """`text_tower(classes, template)`, a maths.prompts.TextTower, if "text tower" is offered."""

    name: str  # as the user wrote it, e.g. "hf:openai/clip-vit-base-patch32"
    offers: frozenset[str]  # a subset of core.NEEDS, as far as its owner opens it
    dim: int
    scale: float  # logit scale
    identity: dict[str, str]  # what the fingerprint covers: weights, activation, dtype, resize, ...

    @property
    def preprocess(self) -> Preprocess | None:
        """None: the encoder takes the encoded bytes themselves."""
        ...

    def embed(self, batch: Sequence[NDArray[Any]] | Sequence[bytes], patches: bool) -> Vectors: ...

    def embed_text(self, sentences: Sequence[str]) -> "Tensor":
        """(sentences, dim) unit-norm float32; only if "text" is offered."""
        ...
