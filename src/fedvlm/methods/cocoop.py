"""A prompt that every image bends a little, by a small network from its embedding to the prompt.

The network stays at the client and is silent at first, so that newcomers use the bare prompt
("server-coop"); or it starts at random and newcomers use that ("random-meta"); or it is averaged
like the prompt ("all-global"). Zhou et al., Conditional prompt learning for vision-language models,
CVPR 2022; the three federated forms are FedOT's (see fedot).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from fedvlm import parts, seeds
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.methods._prompts import Start, class_features, initial_prompt, tower_of
from fedvlm.methods.fedot import update_sequentially
from fedvlm.methods.promptfl import PromptFL

VECTORS = 4  # M of the paper
REDUCTION = 16  # the network's hidden layer is this many times narrower than an embedding
MAX_TOKENS = 1 << 15  # token vectors in the text tower at once: every image has prompts of its own


@register
@dataclass(frozen=True)
class CoCoOp:
    # where the network lives: zero at first and local, drawn and local, or shared
    form: Literal["server-coop", "random-meta", "all-global"] = "server-coop"
    n_ctx: int | None = None  # M: 4, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 2e-3  # η
    momentum: float = 0.9
    weight_decay: float = 5e-4  # weight decay
    batch_size: int = 8  # B; the paper's 1 takes as many steps as there are images
    local_epochs: int = 1  # E
    rounds: int = 10  # T

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        prompt = {"prompt": initial_prompt(self, frozen, default=VECTORS)}
        network = initial_network(frozen, silent=self.form == "server-coop")
        if self.form == "all-global":
            return {**prompt, **network}, {}
        return prompt, network

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        state = {**sent, **local}
        hidden = linear(x, state["down"], state["down bias"]).relu()
        shift = linear(hidden, state["up"], state["up bias"])  # (rows, width)
        tower = tower_of(frozen)
        tokens = 1 + len(state["prompt"]) + tower.suffixes.shape[:2].numel()
        size = max(1, MAX_TOKENS // tokens)
        logits = []
        for images, by in zip(torch.split(x, size), torch.split(shift, size), strict=True):
            text = class_features(frozen, state["prompt"] + by[:, None])  # (rows, classes, dim)
            logits.append(frozen.scale * (text @ images[:, :, None]).squeeze(-1))
        return torch.cat(logits)

    name = "cocoop"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    loss = PromptFL.loss
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
    # Stacked clients would hold all their prompts in memory at once and gain nothing.
    update_many = update_sequentially


def initial_network(frozen: Frozen, silent: bool) -> Tensors:
    """dim -> dim / 16 -> ReLU -> width, drawn as torch draws linear layers; silent: answers 0."""
    draw = seeds.generator("meta-net", frozen.seed)
    hidden, width = max(1, frozen.dim // REDUCTION), tower_of(frozen).width

    def uniform(fan: int, *shape: int) -> Tensor:
        out: Tensor = (2 * torch.rand(*shape, generator=draw) - 1) / fan**0.5
        return out

    network = {
        "down": uniform(frozen.dim, hidden, frozen.dim),
        "down bias": uniform(frozen.dim, hidden),
        "up": uniform(hidden, width, hidden),
        "up bias": uniform(hidden, width),
    }
    if silent:
        network |= {key: torch.zeros_like(network[key]) for key in ("up", "up bias")}
    return network
