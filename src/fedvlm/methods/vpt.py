"""VPT: local learned tokens in the image tower, and a shared head.

Jia et al., Visual prompt tuning, ECCV 2022, as a baseline of the FedOT paper: prompts are local, the head starts from
the class texts. An unseen client has the initial prompts.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm import parts, seeds
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.core.schema import COUNT, NON_NEGATIVE, Range, check_range, ranged_field
from fedvlm.methods._settings import LossSettings, SgdSettings
from fedvlm.methods._towers import count_parameters, tower_of


@register
@dataclass(frozen=True)
class VPT(LossSettings, SgdSettings):
    prompts: int = ranged_field(2, NON_NEGATIVE)  # p, tokens per prompted block; 0 trains only the head
    depth: int = ranged_field(1, COUNT)  # d, first blocks that have prompts; 1 is VPT-shallow
    tau: float = 100.0  # τ
    lr: float = 5e-5  # η and the rest of SGD are FedOT's
    momentum: float = 5e-4
    rounds: int = 200  # T

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        tower = tower_of(frozen)
        check_range("vpt.depth", self.depth, Range(1, tower.blocks))
        assert frozen.text is not None  # promised by `needs`
        shared = {"head": frozen.text}
        if self.prompts == 0:
            return shared, {}
        patch = next(value for value in tower.weights.values() if value.ndim == 4)
        bound = (6 / (prod(patch.shape[1:]) + tower.width)) ** 0.5  # as the authors initialise prompts
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
