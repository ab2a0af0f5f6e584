"""One prompt in front of every class name, trained by every client and averaged each round.

Guo et al., PromptFL: Let federated participants cooperatively learn prompts instead of models,
IEEE Transactions on Mobile Computing 2023; the prompt is CoOp's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts, seeds
from fedvlm.core import Frozen, Tensors, register
from fedvlm.errors import SettingsError
from fedvlm.maths.prompts import TextTower
from fedvlm.methods.prompt_steps import sgd_together


def tower_of(frozen: Frozen) -> TextTower:
    if frozen.text_tower is None:
        raise SettingsError(
            "prompts are learned through the text tower, which this encoder does not offer; "
            "use a CLIP model: demo, or hf:NAME"
        )
    return frozen.text_tower


def first_prompt(frozen: Frozen, vectors: int, purpose: str = "prompt") -> Tensor:
    """(vectors, width) drawn from N(0, 0.02²); what does not fit the tower is refused."""
    tower = tower_of(frozen)
    if vectors < 1:
        raise SettingsError(f"vectors = {vectors}; a prompt has 1 or more")
    if vectors > tower.room:
        longest = int(tower.ends.argmax())
        name, tokens = frozen.classes[longest], int(tower.ends[longest]) + 1
        raise SettingsError(
            f"vectors = {vectors}, but the text tower reads {len(tower.positions)} tokens and the "
            f"class {name!r} takes {tokens} of them, which leaves room for {max(tower.room, 0)}; "
            "use fewer vectors, or shorten the class name"
        )
    generator = seeds.generator(purpose, frozen.seed)
    return 0.02 * torch.randn(vectors, tower.width, generator=generator)


def class_features(frozen: Frozen, prompt: Tensor) -> Tensor:
    """(..., classes, dim) unit-norm: what the text tower makes of each class behind the prompt."""
    return tower_of(frozen)(prompt)


def features_of_both(frozen: Frozen, one: Tensor, other: Tensor) -> Tensor:
    """(..., 2, classes, dim): of two prompts of one length, at once where both are in training."""
    if one.requires_grad and other.requires_grad:
        return class_features(frozen, torch.stack([one, other], dim=-3))
    return torch.stack([class_features(frozen, one), class_features(frozen, other)], dim=-3)


@register
@dataclass(frozen=True)
class PromptFL:
    vectors: int = 16  # M
    rate: float = 1e-3  # η
    momentum: float = 0.9
    decay: float = 5e-4  # weight decay
    batch: int = 32  # B
    epochs: int = 5  # E
    rounds: int = 10  # T

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        return {"prompt": first_prompt(frozen, self.vectors)}, {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        prompt = {**sent, **local}["prompt"]  # CoOp holds it locally
        return frozen.scale * x @ class_features(frozen, prompt).mT

    name = "promptfl"
    needs, memory = frozenset({"image", "text tower"}), frozenset[str]()
    loss = parts.misfit
    send, update, aggregate, adapt = parts.everything, parts.sgd, parts.mean, parts.nothing
    update_many = sgd_together
