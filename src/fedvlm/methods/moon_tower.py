"""FedAvg on the image tower whose features are held near the shared model's and away from the
client's own of the round before.

Li, He, Song, Model-contrastive federated learning, CVPR 2021.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedvlm import parts
from fedvlm.core import Batch, Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.methods._towers import text_logits, tower_of
from fedvlm.methods.fedavg_tower import FedAvgTower


@register
@dataclass(frozen=True)
class MoonTower:
    mu: float = 1.0  # μ, of the contrast
    temperature: float = 0.5  # τ
    blocks: int = 0  # of the tower that are trained, the last ones; 0 is all of it
    lr: float = 5e-5  # η
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.02
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 50  # T

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared, _ = FedAvgTower(self.blocks).init(frozen)
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
        real = torch.where(batch.real, contrast, 0.0).sum() / batch.real.sum().clamp(min=1)
        return fit + self.mu * real

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        upload, _ = parts.adam(self, frozen, sent, local, client)
        return upload, {"previous": flatten_change(frozen, upload)}

    name = "moon-tower"
    traits = Traits(needs=frozenset({"image tower", "text"}), training=TrainingTraits(memory=frozenset({"previous"})))
    predict, describe = FedAvgTower.predict, FedAvgTower.describe
    send, aggregate, adapt = parts.send_all, parts.mean, parts.no_adaptation


# The model of the round before is kept as what it differs by from the encoder's own weights, in
# half precision: half the memory of every client, and nothing at all before the first round.


def flatten_change(frozen: Frozen, weights: Tensors) -> Tensor:
    first = tower_of(frozen).weights
    return torch.cat([(weights[key] - first[key]).reshape(-1).half() for key in sorted(weights)])


def restore_weights(frozen: Frozen, like: Tensors, flat_change: Tensor) -> Tensors:
    first, keys = tower_of(frozen).weights, sorted(like)
    changes = torch.split(flat_change, [first[key].numel() for key in keys])
    return {key: first[key] + change.reshape(first[key].shape) for key, change in zip(keys, changes, strict=True)}
