"""MOON on the image tower: FedAvg with a contrastive loss between models.

It draws a client's features to those of the shared model, and away from those of its own model of the round before.

Li, He, Song, Model-contrastive federated learning, CVPR 2021.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedvlm import parts
from fedvlm.core import Batch, Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.core.schema import NON_NEGATIVE, ranged_field
from fedvlm.methods._settings import AdamSettings, LossSettings
from fedvlm.methods._towers import text_logits, tower_of
from fedvlm.methods.fedavg_tower import FedAvgTower


@register
@dataclass(frozen=True)
class MoonTower(LossSettings, AdamSettings):
    mu: float = 1.0  # μ, weight of the contrastive loss
    temperature: float = 0.5  # τ
    blocks: int = ranged_field(0, NON_NEGATIVE)  # last blocks of the tower that are trained; 0 trains all of it

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared, _ = FedAvgTower(blocks=self.blocks).init(frozen)
        count = sum(value.numel() for value in shared.values())
        return shared, {"previous": torch.zeros(count, dtype=torch.float16)}

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        tower = tower_of(frozen)
        features = tower(shared, batch.x)
        fit = parts.masked_cross_entropy(text_logits(frozen, features), batch.y, batch.real)
        if self.mu == 0:
            return fit
        shared_similarity = cosine_similarity(features, tower(start, batch.x))
        previous_features = tower(restore_weights(frozen, shared, local["previous"]), batch.x)
        previous_similarity = cosine_similarity(features, previous_features)
        # -log of e^a / (e^a + e^b) is softplus(b - a)
        contrast = softplus((previous_similarity - shared_similarity) / self.temperature)
        mean = torch.where(batch.real > 0, contrast, 0.0).sum() / (batch.real > 0).sum().clamp(min=1)
        return fit + self.mu * mean

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        upload, _ = parts.adam(self, frozen, sent, local, client)
        first = tower_of(frozen).weights
        change = [(upload[key] - first[key]).reshape(-1).half() for key in sorted(upload)]
        return upload, {"previous": torch.cat(change)}

    name = "moon-tower"
    traits = Traits(needs=frozenset({"image tower", "text"}), training=TrainingTraits(memory=frozenset({"previous"})))
    predict, describe = FedAvgTower.predict, FedAvgTower.describe
    send, aggregate, adapt = parts.send_all, parts.mean, parts.no_adaptation


def restore_weights(frozen: Frozen, like: Tensors, flat_change: Tensor) -> Tensors:
    """Return the model of the round before, which is kept as its difference from the encoder, in half precision.

    This halves the memory of every client, and is zero before the first round.
    """
    first, keys = tower_of(frozen).weights, sorted(like)
    changes = torch.split(flat_change, [first[key].numel() for key in keys])
    return {key: first[key] + change.reshape(first[key].shape) for key, change in zip(keys, changes, strict=True)}
