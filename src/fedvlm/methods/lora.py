"""LoRA: a low-rank change W + B A of matrices of the image tower, whose W is frozen.

Hu et al., LoRA: Low-rank adaptation of large language models, ICLR 2022. The mean of clients' factors is not the mean
of their products: `average` says which of the two the server takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm import parts, seeds
from fedvlm.core import Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.errors import SettingsError
from fedvlm.methods._settings import AdamSettings, LossSettings
from fedvlm.methods._towers import count_parameters, text_logits, tower_of


@register
@dataclass(frozen=True)
class LoRA(LossSettings, AdamSettings):
    targets: tuple[str, ...] = ("q", "k", "v", "out", "up", "down")  # matrices of every block
    rank: int = 3  # r; 0 trains nothing
    average: Literal["factors", "products"] = "factors"  # the mean of A and of B, or of B A

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        if not self.targets:
            raise SettingsError("lora.targets must name at least one of q, k, v, out, up, down; got none")
        matrices = tower_of(frozen).matrices(self.targets)
        if self.rank == 0:
            return {}, {}
        if self.average == "factors":
            return self.factors(frozen), {}
        weights = tower_of(frozen).weights
        # The mean of products has full rank, so the server keeps and sends the change itself.
        return {"change": torch.zeros(sum(weights[key].numel() for key in matrices))}, {}

    def factors(self, frozen: Frozen) -> Tensors:
        """Return random A and zero B, which leave the tower unchanged; the same for every client and round."""
        tower, draw = tower_of(frozen), seeds.generator("lora", frozen.seed)
        out: Tensors = {}
        for key in sorted(tower.matrices(self.targets)):
            height, width = tower.weights[key].shape
            drawn = torch.rand(self.rank, width, generator=draw, device=draw.device)
            out[f"{key} A"] = ((2 * drawn - 1) * width**-0.5).to(tower.weights[key].device)
            out[f"{key} B"] = torch.zeros(height, self.rank)
        return out

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        tower = tower_of(frozen)
        keys = sorted(tower.matrices(self.targets))
        weights = {key: tower.weights[key] for key in keys}
        if "change" in sent:
            changes = torch.split(sent["change"], [weights[key].numel() for key in keys])
            for key, change in zip(keys, changes, strict=True):
                weights[key] = weights[key] + change.reshape(weights[key].shape)
        for key in keys:
            if f"{key} A" in sent:
                weights[key] = weights[key] + sent[f"{key} B"] @ sent[f"{key} A"]
        return text_logits(frozen, tower(weights, x))

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        if self.rank == 0:
            return sent, local
        if self.average == "factors":
            return parts.adam(self, frozen, sent, local, client)
        upload, _ = parts.adam(self, frozen, {**sent, **self.factors(frozen)}, local, client)
        return {key: value for key, value in upload.items() if key != "change"}, local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        if self.average == "factors":
            return parts.mean(self, shared, uploads, weights, ids)
        client_weights = weights.double() / weights.double().sum()
        change = []
        for key in sorted(key[:-2] for key in uploads[0] if key.endswith(" A")):
            products = (upload[f"{key} B"].double() @ upload[f"{key} A"].double() for upload in uploads)
            total = sum(w * product for w, product in zip(client_weights, products, strict=True))
            change.append(torch.as_tensor(total, dtype=torch.float32).reshape(-1))
        return {"change": shared["change"] + torch.cat(change)}

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        matrices = [tower_of(frozen).weights[key] for key in tower_of(frozen).matrices(self.targets)]
        trained = self.rank * sum(sum(matrix.shape) for matrix in matrices)
        return {**count_parameters(frozen, trained), "rank": self.rank}

    name = "lora"
    traits = Traits(needs=frozenset({"image tower", "text"}), training=TrainingTraits(memory=frozenset({"change"})))
    loss = parts.cross_entropy
    send, adapt = parts.send_all, parts.no_adaptation
