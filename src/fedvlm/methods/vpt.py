"""Learnt tokens in the image tower, every client's own, and one head that all of them train.

Jia et al., Visual prompt tuning, ECCV 2022, as the FedOT paper compares itself with it: prompts
stay at home, the head starts from the class texts. An unseen client has the first, untrained ones.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm import parts, seeds
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.errors import SettingsError
from fedvlm.methods._towers import count_parameters, tower_of


@register
@dataclass(frozen=True)
class VPT:
    prompts: int = 2  # p, tokens in each block that has some; 0 leaves only the head
    depth: int = 1  # d, blocks with prompts of their own, the first ones; 1 is VPT-shallow
    tau: float = 100.0  # τ
    lr: float = 5e-5  # η, FedOT's, as is the rest of its SGD
    momentum: float = 5e-4
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 200  # T

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        tower = tower_of(frozen)
        if self.prompts < 0 or not 1 <= self.depth <= tower.blocks:
            raise SettingsError(
                f"vpt with prompts = {self.prompts} and depth = {self.depth}; prompts are 0 or "
                f"more, in 1 (shallow) to {tower.blocks} (deep) blocks of this encoder"
            )
        assert frozen.text is not None  # promised by `needs`
        shared = {"head": frozen.text}
        if self.prompts == 0:
            return shared, {}
        patch = next(value for value in tower.weights.values() if value.ndim == 4)
        bound = (6 / (prod(patch.shape[1:]) + tower.width)) ** 0.5  # the authors' first prompts
        draw = torch.rand(self.depth, self.prompts, tower.width, generator=seeds.generator("vpt", frozen.seed))
        return shared, {"prompts": bound * (2 * draw - 1)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        features = tower_of(frozen)({}, x, local.get("prompts"))
        return self.tau * normalize(features, dim=-1) @ sent["head"].mT

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        return count_parameters(frozen, sum(value.numel() for value in (*sent.values(), *local.values())))

    name = "vpt"
    traits = Traits(needs=frozenset({"image tower", "text"}))
    loss = parts.cross_entropy
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.uniform_mean, parts.no_adaptation
