"""Every client's prompt in one ensemble, and a small network over all their logits.

FENS + PromptFL of the TOFA tables: Allouah et al., Revisiting ensembling in one-shot federated
learning, NeurIPS 2024. It is one-shot in its prompts only: after the exchange that uploads them,
500 more train the network by FedAdam (Reddi et al., ICLR 2021), and the first of those hands out
all prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad

from fedvlm import parts, seeds
from fedvlm.core import Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.core.schema import COUNT, check_ranges, ranged_field
from fedvlm.methods._prompts import Start, class_features, initial_prompt
from fedvlm.methods.promptfl import PromptFL

NETWORK = ("hidden weight", "hidden bias", "out weight", "out bias")
HOLDS_PREFIX = "holds all "  # the server's mark for a client that has all prompts: this and its id
BETAS, FEDADAM_TAU = (0.9, 0.99), 1e-3  # β₁, β₂ and τ of FedAdam


@register
@dataclass(frozen=True)
class FENS:
    units: int = ranged_field(2, COUNT)  # d': hidden units per client
    server_lr: float = 1e-3  # of FedAdam; a client's step of rate 1 is the gradient itself
    n_ctx: int | None = None  # M: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 1e-3  # η
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 50  # E
    rounds: int = 501  # one for the prompts, 500 for the network

    def __post_init__(self) -> None:
        check_ranges("fens", self)

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared = {
            "prompt": initial_prompt(self, frozen),
            "origin": torch.tensor([frozen.seed, len(frozen.classes)]),  # for the network's start
        }
        # (prompts, classes, dim): once a client has all prompts it need not be sent them again
        return shared, {"features": torch.zeros(0, len(frozen.classes), frozen.dim)}

    def send(self, shared: Tensors, id: str) -> Tensors:
        if "prompts" not in shared:
            return {"prompt": shared["prompt"]}
        missing = () if HOLDS_PREFIX + id in shared else ("prompts",)
        return {key: shared[key] for key in (*missing, *NETWORK)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        if "prompt" in sent:
            return frozen.scale * x @ class_features(frozen, sent["prompt"]).mT
        held = "prompts" not in sent
        features = local["features"] if held else class_features(frozen, sent["prompts"])
        return ensemble_logits(sent, frozen.scale * x @ features.flatten(0, 1).mT)

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        """What a client does follows from what it was sent: the first prompt, or the network."""
        if "prompt" in sent:
            return parts.sgd(self, frozen, sent, local, client)
        if "prompts" in sent:
            local = {"features": class_features(frozen, sent["prompts"])}
        # The validation rows are the paper's proxy split; without any, the training rows.
        held = client.val_y >= 0
        y = torch.cat([client.val_y, client.y])
        real = torch.cat([held, (client.y >= 0) & ~held.any()])
        x = torch.where(real[:, None], torch.cat([client.val_x, client.x]), 0.0)

        def fit(network: Tensors) -> Tensor:
            return parts.masked_cross_entropy(self.predict(frozen, network, local, x), y.clamp(min=0), real)

        return grad(fit)({key: sent[key] for key in NETWORK}), local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        if "prompts" not in shared:
            prompts = torch.stack([upload["prompt"] for upload in uploads])
            seed, classes = shared["origin"].tolist()
            return {"prompts": prompts, **initial_network(len(uploads), classes, self.units, seed)}
        network = {key: shared[key] for key in NETWORK}
        gradient = parts.mean(self, network, uploads, weights, ids)
        out = {**shared, **{HOLDS_PREFIX + id: torch.zeros(0) for id in ids}}
        for key, value in network.items():
            first = BETAS[0] * shared[f"first {key}"] + (1 - BETAS[0]) * gradient[key]
            second = BETAS[1] * shared[f"second {key}"] + (1 - BETAS[1]) * gradient[key] ** 2
            moved = value - self.server_lr * first / (second.sqrt() + FEDADAM_TAU)
            out |= {key: moved, f"first {key}": first, f"second {key}": second}
        return out

    name = "fens"
    traits = Traits(needs=frozenset({"image", "text tower"}), training=TrainingTraits(memory=frozenset({"features"})))
    loss, adapt = PromptFL.loss, parts.no_adaptation


def ensemble_logits(network: Tensors, logits: Tensor) -> Tensor:
    """(rows, classes) from the logits (rows, prompts * classes) of all prompts."""
    hidden = (logits @ network["hidden weight"] + network["hidden bias"]).relu()
    return hidden @ network["out weight"] + network["out bias"]


def initial_network(clients: int, classes: int, units: int, seed: int) -> Tensors:
    """The network before its first step, and FedAdam's moments."""
    generator = seeds.generator("ensemble", seed)
    sizes = (clients * classes, clients * units, classes)
    network: Tensors = {}
    for name, wide, narrow in zip(("hidden", "out"), sizes, sizes[1:], strict=False):
        bound = wide**-0.5
        network[f"{name} weight"] = bound * (2 * torch.rand(wide, narrow, generator=generator) - 1)
        network[f"{name} bias"] = torch.zeros(narrow)
    zeros = {key: torch.zeros_like(value) for key, value in network.items()}
    return {**network, **{f"{m} {key}": zeros[key] for m in ("first", "second") for key in zeros}}
