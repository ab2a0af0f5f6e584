"""The linear head that several methods start from."""

from typing import Any

import torch
from torch import Tensor

from fedvlm import seeds
from fedvlm.core import Frozen, Traits
from fedvlm.errors import SettingsError


def initial_head(head: str, frozen: Frozen) -> Tensor:
    """(classes, dim): the text embeddings, or short rows of random direction.

    Rows as long as text embeddings would be a wrong answer that local maps learn to turn to,
    each in its own way, before the head has learnt anything that clients could share.
    """
    if head == "random":
        draw = torch.randn(len(frozen.classes), frozen.dim, generator=seeds.generator("head", frozen.seed))
        return 0.1 * torch.nn.functional.normalize(draw, dim=1)
    if head != "text":
        raise SettingsError(f"head = {head!r}; a head starts from 'text' or 'random'")
    if frozen.text is None:
        raise SettingsError("head = 'text', but the encoder has no text; set head = 'random'")
    return frozen.text


def head_needs(head: str) -> frozenset[str]:
    return frozenset({"image", "text"} if head == "text" else {"image"})


def head_traits(**extra_traits: Any) -> Any:
    """The property `traits` of a method whose `head` asks for text only if it starts from it."""

    return property(lambda self: Traits(needs=head_needs(self.head), **extra_traits))
