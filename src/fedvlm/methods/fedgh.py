"""Clients send the mean embedding of each class; the server trains one head on all of them.

Yi, Wang, Liu, Shi, Yu, FedGH: heterogeneous federated learning with generalized global header,
ACM Multimedia 2023; FedGH(C) of the FedOT paper, with a frozen encoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import one_hot

from fedvlm import parts
from fedvlm.core import MIN_CLASS_SAMPLES, Batch, ClassTraits, Client, Frozen, Tensors, Traits, register
from fedvlm.methods._heads import head_needs, initial_head


@register
@dataclass(frozen=True)
class FedGH:
    server_lr: float = 1e-2  # the server's SGD
    min_class_samples: int = MIN_CLASS_SAMPLES  # rows a class must have at a client for its mean to be uploaded
    server_epochs: int = 1  # of the server over all prototypes in a round
    lr: float = 1e-3  # a client's own SGD, at the end
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 32
    local_epochs: int = 1
    rounds: int = 50
    head: Literal["text", "random"] = "text"

    @property
    def traits(self) -> Traits:
        return Traits(needs=head_needs(self.head), classes=ClassTraits(min_class_samples=self.min_class_samples))

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        head = initial_head(self.head, frozen)
        bias = torch.zeros(len(head))
        # What a client's own head adds to the server's: nothing for a client nobody has seen.
        local = {"own head": torch.zeros_like(head), "own bias": bias}
        return {"head": head, "bias": bias, "scale": torch.tensor(frozen.scale)}, local

    def send(self, shared: Tensors, id: str) -> Tensors:
        return {key: shared[key] for key in ("head", "bias")}

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        """The encoder is frozen, so a round's training would change no prototype: there is none."""
        kind = one_hot(client.y.clamp(min=0), len(frozen.classes)) * (client.y >= 0)[:, None]
        counts = kind.sum(0)
        # Zero where the client has no row of a class, or too few to tell of.
        means = kind.to(client.x.dtype).mT @ client.x / counts.clamp(min=1)[:, None]
        return {"prototypes": torch.where((counts >= self.min_class_samples)[:, None], means, 0.0)}, local

    def class_means(self, upload: Tensors) -> Tensor:
        """(classes, dim) what the upload says of the class means, for an audit."""
        return upload["prototypes"]

    def covered_classes(self, upload: Tensors) -> Tensor:
        """(classes,) True where the upload tells of rows of the class."""
        return (upload["prototypes"] != 0).any(dim=1)

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        """Steps of the head itself, on every client's prototypes of the classes it has."""
        x = torch.cat([upload["prototypes"] for upload in uploads])
        y = torch.arange(len(shared["head"])).repeat(len(uploads))
        is_covered = self.covered_classes({"prototypes": x})

        def misfit(head: Tensors) -> Tensor:
            return parts.masked_cross_entropy(shared["scale"] * x @ head["head"].mT + head["bias"], y, is_covered)

        head = {key: shared[key] for key in ("head", "bias")}
        for _ in range(self.server_epochs):
            gradient = grad(misfit)(head)
            head = {key: value - self.server_lr * gradient[key] for key, value in head.items()}
        return {**shared, **head}

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        """A client is measured after it has trained the head it was sent on its own rows."""
        _, local_head = parts.sgd(self, frozen, {}, sent, client)
        return {f"own {key}": local_head[key] - sent[key] for key in sent}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        head, bias = (sent[key] + local[f"own {key}"] for key in ("head", "bias"))
        return frozen.scale * x @ head.mT + bias

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        logits = frozen.scale * batch.x @ local["head"].mT + local["bias"]
        return parts.masked_cross_entropy(logits, batch.y, batch.real)

    name = "fedgh"
