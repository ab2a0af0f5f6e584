"""CoCoOp: a prompt that a small network shifts for every image, by the image's embedding.

The network is local and starts at zero, so that unseen clients use the bare prompt ("server-coop"); or it is local and
starts at random ("random-meta"); or it is averaged like the prompt ("all-global"). Zhou et al., Conditional prompt
learning for vision-language models, CVPR 2022; the three federated forms are FedOT's (see fedot).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from fedvlm import parts, seeds
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.methods._prompts import class_features, initial_prompt, tower_of
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods._stacking import update_sequentially
from fedvlm.methods.promptfl import PromptFL

VECTORS = 4  # M of the paper
REDUCTION = 16  # the network's hidden layer is this many times narrower than an embedding
MAX_TOKENS = 1 << 15  # in the text tower at once: every image has a prompt of its own


@register
@dataclass(frozen=True)
class CoCoOp(PromptSettings):
    # the network is local and zero at first, local and random at first, or shared
    form: Literal["server-coop", "random-meta", "all-global"] = "server-coop"
    n_ctx: int | None = None  # M: 4, or the template's
    lr: float = 2e-3  # η
    batch_size: int = 8  # B; the paper's 1 takes as many steps as there are images
    local_epochs: int = 1  # E

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        prompt = {"prompt": initial_prompt(self, frozen, default=VECTORS)}
        network = initial_network(frozen, zero=self.form == "server-coop")
        if self.form == "all-global":
            return {**prompt, **network}, {}
        return prompt, network

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        state = {**sent, **local}
        hidden = linear(x, state["down"], state["down bias"]).relu()
        shift = linear(hidden, state["up"], state["up bias"])  # (samples, width)
        tokens = 1 + len(state["prompt"]) + tower_of(frozen).suffixes.shape[:2].numel()
        size = max(1, MAX_TOKENS // tokens)
        logits = []
        for images, shifts in zip(torch.split(x, size), torch.split(shift, size), strict=True):
            text = class_features(frozen, state["prompt"] + shifts[:, None])  # (samples, classes, dim)
            logits.append(frozen.scale * (text @ images[:, :, None]).squeeze(-1))
        return torch.cat(logits)

    name = "cocoop"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    loss = PromptFL.loss
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
    # Stacking would hold the prompts of all clients in memory at once and gain nothing.
    update_many = update_sequentially


def initial_network(frozen: Frozen, zero: bool) -> Tensors:
    """Return a network dim -> dim / 16 -> ReLU -> width, initialised as torch's linear layers, or with output 0."""
    draw = seeds.generator("meta-net", frozen.seed)
    hidden, width = max(1, frozen.dim // REDUCTION), tower_of(frozen).width

    def uniform(fan: int, *shape: int) -> Tensor:
        out: Tensor = (2 * torch.rand(*shape, generator=draw) - 1) / fan**0.5
        return out

    network = {"down": uniform(frozen.dim, hidden, frozen.dim), "down bias": uniform(frozen.dim, hidden)}
    network |= {"up": uniform(hidden, width, hidden), "up bias": uniform(hidden, width)}
    if zero:
        network |= {key: torch.zeros_like(network[key]) for key in ("up", "up bias")}
    return network
