"""FedGH: clients upload the mean embedding of each class, and the server trains one head on all of them.

Yi, Wang, Liu, Shi, Yu, FedGH: heterogeneous federated learning with generalized global header, ACM Multimedia 2023;
FedGH(C) of the FedOT paper, with a frozen encoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import one_hot

from fedvlm import parts
from fedvlm.core import Batch, ClassTraits, Client, Frozen, Tensors, Traits, register
from fedvlm.core.schema import EPOCHS, ranged_field
from fedvlm.methods._heads import initial_head
from fedvlm.methods._settings import HeadSettings, StatisticsSettings, head_needs


@register
@dataclass(frozen=True)
class FedGH(HeadSettings, StatisticsSettings):
    server_lr: float = 1e-2  # of the server's SGD
    server_epochs: int = ranged_field(1, EPOCHS)  # over all prototypes, at the server in a round
    lr: float = 1e-3  # of a client's SGD, after the last round
    weight_decay: float = 0.0

    @property
    def traits(self) -> Traits:
        return Traits(needs=head_needs(self.head), classes=ClassTraits(min_class_samples=self.min_class_samples))

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        head = initial_head(self.head, frozen)
        bias = torch.zeros(len(head))
        # A client's head minus the server's: zero for an unseen client.
        local = {"head change": torch.zeros_like(head), "bias change": bias}
        return {"head": head, "bias": bias, "scale": torch.tensor(frozen.scale)}, local

    def send(self, shared: Tensors, id: str) -> Tensors:
        return {key: shared[key] for key in ("head", "bias")}

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        """Return class means; nothing is trained, because the encoder is frozen."""
        membership = one_hot(client.y.clamp(min=0), len(frozen.classes)) * (client.y >= 0)[:, None]
        counts = membership.sum(0)
        means = membership.to(client.x.dtype).mT @ client.x / counts.clamp(min=1)[:, None]
        return {"prototypes": torch.where((counts >= self.min_class_samples)[:, None], means, 0.0)}, local

    def class_means(self, upload: Tensors) -> Tensor:
        """Return the (classes, dim) class means that can be read from the upload."""
        return upload["prototypes"]

    def covered_classes(self, upload: Tensors) -> Tensor:
        """Return (classes,) True where the upload depends on samples of the class."""
        return (upload["prototypes"] != 0).any(dim=1)

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        """Train the head on the prototypes of all clients."""
        x = torch.cat([upload["prototypes"] for upload in uploads])
        y = torch.arange(len(shared["head"])).repeat(len(uploads))
        is_covered = self.covered_classes({"prototypes": x})

        def loss(head: Tensors) -> Tensor:
            return parts.masked_cross_entropy(shared["scale"] * x @ head["head"].mT + head["bias"], y, is_covered)

        head = {key: shared[key] for key in ("head", "bias")}
        for _ in range(self.server_epochs):
            gradient = grad(loss)(head)
            head = {key: value - self.server_lr * gradient[key] for key, value in head.items()}
        return {**shared, **head}

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        """Train the head on the client's own samples."""
        _, local_head = parts.sgd(self, frozen, {}, sent, client)
        return {f"{key} change": local_head[key] - sent[key] for key in sent}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        head, bias = (sent[key] + local[f"{key} change"] for key in ("head", "bias"))
        return frozen.scale * x @ head.mT + bias

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        logits = frozen.scale * batch.x @ local["head"].mT + local["bias"]
        return parts.masked_cross_entropy(logits, batch.y, batch.real)

    name = "fedgh"
