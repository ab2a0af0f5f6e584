"""FENS: an ensemble of all clients' prompts, and a small network over their logits.

FENS + PromptFL of the TOFA tables: Allouah et al., Revisiting ensembling in one-shot federated learning, NeurIPS 2024.
Only its prompts are one-shot: after the round that uploads them, 500 more train the network by FedAdam (Reddi et al.,
ICLR 2021), and the first of those sends all prompts to the clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad

from fedvlm import parts, seeds
from fedvlm.core import Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.core.schema import COUNT, ranged_field
from fedvlm.methods._prompts import class_features, initial_prompt, prompt_logits
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods.promptfl import PromptFL

NETWORK = ("hidden weight", "hidden bias", "out weight", "out bias")
HOLDS_PREFIX = "holds all "  # with a client's id: the client has all prompts
BETAS, FEDADAM_TAU = (0.9, 0.99), 1e-3  # β₁, β₂ and τ of FedAdam


@register
@dataclass(frozen=True)
class FENS(PromptSettings):
    units: int = ranged_field(2, COUNT)  # d': hidden units per client
    server_lr: float = 1e-3  # of FedAdam; clients upload gradients
    local_epochs: int = 50  # E
    rounds: int = 501  # one for the prompts, 500 for the network

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared = {
            "prompt": initial_prompt(self, frozen),
            "origin": torch.tensor([frozen.seed, len(frozen.classes)]),  # to initialise the network
        }
        # (prompts, classes, dim): kept, so that all prompts are sent to a client once
        return shared, {"features": torch.zeros(0, len(frozen.classes), frozen.dim)}

    def send(self, shared: Tensors, id: str) -> Tensors:
        if "prompts" not in shared:
            return {"prompt": shared["prompt"]}
        missing = () if HOLDS_PREFIX + id in shared else ("prompts",)
        return {key: shared[key] for key in (*missing, *NETWORK)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        if "prompt" in sent:
            return prompt_logits(frozen, sent["prompt"], x)
        features = class_features(frozen, sent["prompts"]) if "prompts" in sent else local["features"]
        logits = frozen.scale * x @ features.flatten(0, 1).mT  # (samples, prompts * classes)
        hidden = (logits @ sent["hidden weight"] + sent["hidden bias"]).relu()
        return hidden @ sent["out weight"] + sent["out bias"]

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        """Train the prompt, or return the gradient of the network, by what was sent."""
        if "prompt" in sent:
            return parts.sgd(self, frozen, sent, local, client)
        if "prompts" in sent:
            local = {"features": class_features(frozen, sent["prompts"])}
        # The validation samples are the paper's proxy split; without any, the training samples.
        is_val = client.val_y >= 0
        y = torch.cat([client.val_y, client.y])
        real = torch.cat([is_val, (client.y >= 0) & ~is_val.any()])
        weights = parts.class_weights(self, len(frozen.classes), client)
        x = torch.where(real[:, None], torch.cat([client.val_x, client.x]), 0.0)

        def loss(network: Tensors) -> Tensor:
            labels, logits = y.clamp(min=0), self.predict(frozen, network, local, x)
            return parts.masked_cross_entropy(logits, labels, real if weights is None else real * weights[labels])

        return grad(loss)({key: sent[key] for key in NETWORK}), local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        if "prompts" not in shared:
            in_order = sorted(range(len(ids)), key=ids.__getitem__)  # the network has a place for each client
            prompts = torch.stack([uploads[place]["prompt"] for place in in_order])
            seed, classes = shared["origin"].tolist()
            return {"prompts": prompts, **initial_network(len(uploads), classes, self.units, seed)}
        network = {key: shared[key] for key in NETWORK}
        gradient = parts.mean(self, network, uploads, weights, ids)
        out = {**shared, **{HOLDS_PREFIX + id: torch.zeros(0) for id in ids}}
        for key, value in network.items():
            first = BETAS[0] * shared[f"first {key}"] + (1 - BETAS[0]) * gradient[key]
            second = BETAS[1] * shared[f"second {key}"] + (1 - BETAS[1]) * gradient[key] ** 2
            updated = value - self.server_lr * first / (second.sqrt() + FEDADAM_TAU)
            out |= {key: updated, f"first {key}": first, f"second {key}": second}
        return out

    name = "fens"
    traits = Traits(needs=frozenset({"image", "text tower"}), training=TrainingTraits(memory=frozenset({"features"})))
    loss, adapt = PromptFL.loss, parts.no_adaptation


def initial_network(clients: int, classes: int, units: int, seed: int) -> Tensors:
    """Return the initial network, and FedAdam's moments."""
    generator = seeds.generator("ensemble", seed)
    sizes = (clients * classes, clients * units, classes)
    network: Tensors = {}
    for name, wide, narrow in zip(("hidden", "out"), sizes, sizes[1:], strict=False):
        bound = wide**-0.5
        network[f"{name} weight"] = bound * (2 * torch.rand(wide, narrow, generator=generator) - 1)
        network[f"{name} bias"] = torch.zeros(narrow)
    zeros = {key: torch.zeros_like(value) for key, value in network.items()}
    return {**network, **{f"{m} {key}": zeros[key] for m in ("first", "second") for key in zeros}}
