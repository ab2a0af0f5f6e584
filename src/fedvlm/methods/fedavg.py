"""One linear head, trained by every client on its own rows and averaged by rows each round.

McMahan et al., Communication-efficient learning of deep networks from decentralized data,
AISTATS 2017.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm import parts, seeds
from fedvlm.core import Frozen, Tensors, register
from fedvlm.errors import SettingsError


def first_head(head: str, frozen: Frozen) -> Tensor:
    """(classes, dim): the text embeddings, or short rows of random direction.

    Rows as long as text embeddings would be a wrong answer that local maps learn to turn to,
    each in its own way, before the head has learnt anything that clients could share.
    """
    if head == "random":
        draw = torch.randn(
            len(frozen.classes), frozen.dim, generator=seeds.generator("head", frozen.seed)
        )
        return 0.1 * torch.nn.functional.normalize(draw, dim=1)
    if head != "text":
        raise SettingsError(f"head = {head!r}; a head starts from 'text' or 'random'")
    if frozen.text is None:
        raise SettingsError("head = 'text', but the encoder has no text; set head = 'random'")
    return frozen.text


@register
@dataclass(frozen=True)
class FedAvg:
    rate: float = 1e-3  # η
    momentum: float = 0.0
    decay: float = 5e-4  # weight decay
    batch: int = 32  # B
    epochs: int = 1  # E
    rounds: int = 50  # T
    head: Literal["text", "random"] = "text"

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {"head": first_head(self.head, frozen)}, {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return frozen.scale * x @ sent["head"].mT

    name = "fedavg"
    needs, memory = frozenset({"image"}), frozenset[str]()
    loss = parts.misfit
    send, update, aggregate, adapt = parts.everything, parts.sgd, parts.mean, parts.nothing
