"""Clients send Gaussian mixtures of their classes once; the server draws embeddings from them and trains a head.

Beitollahi et al., Parametric feature transfer: one-shot federated learning with foundation models, 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm import parts, seeds
from fedvlm.core import Client, Frozen, Tensors, register
from fedvlm.core.schema import COUNT, POSITIVE, Range, ranged_field
from fedvlm.maths import gaussian_classes, logistic_regression
from fedvlm.methods._settings import StatisticsSettings, statistics_traits

MIN_VARIANCE = 1e-6  # added to every variance, as scikit-learn's mixtures do


@register
@dataclass(frozen=True)
class FedPFT(StatisticsSettings):
    mixtures: int = ranged_field(1, COUNT)  # K: components per class; 1 in Flower's baseline
    covariance: Literal["spherical", "diagonal"] = "spherical"  # of a component
    iterations: int = ranged_field(30, COUNT)  # of expectation maximisation
    ridge: float = ranged_field(1e-4, POSITIVE)  # of the server's logistic regression
    rounds: int = ranged_field(1, Range(1, 1))

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes, dim = len(frozen.classes), frozen.dim
        directions = torch.randn(self.mixtures, dim, generator=seeds.generator("fedpft", frozen.seed))
        seed = torch.tensor(frozen.seed)
        head = {"weight": torch.zeros(classes, dim), "bias": torch.zeros(classes)}
        return {**head, "directions": directions, "seed": seed}, {}

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        classes = len(frozen.classes)
        counts = gaussian_classes.class_membership(client.y, classes).sum(0)
        y = gaussian_classes.suppress_small_classes(client.y, counts, self.min_class_samples)
        members = gaussian_classes.class_membership(y, classes)  # (samples, classes)
        x, label = client.x.double(), y.clamp(min=0)
        centre = members.mT @ torch.where((y >= 0)[:, None], x, 0.0) / counts.clamp(min=1)[:, None]
        nearest = ((x - centre[label]) @ sent["directions"].double().mT).argmax(1)
        chosen = (nearest[:, None] == torch.arange(self.mixtures, device=y.device)).double()
        mixture = self.maximise(x, members, chosen)
        for _ in range(self.iterations if self.mixtures > 1 else 0):
            mixture = self.maximise(x, members, self.responsibilities(x, label, mixture))
        kept = {key: value.float() for key, value in zip(("weights", "means", "variances"), mixture, strict=True)}
        return {"counts": members.sum(0).float(), **kept}, local

    def maximise(self, x: Tensor, members: Tensor, responsibilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(classes, K) weights, (classes, K, dim) means and (classes, K, dim or 1) variances of every class."""
        shares = members[:, :, None] * responsibilities[:, None]  # (samples, classes, K)
        real = members.sum(1) > 0
        x = torch.where(real[:, None], x, 0.0)
        mass = shares.sum(0)
        size = mass.clamp(min=1e-12)[..., None]
        means = torch.einsum("nck,nd->ckd", shares, x) / size
        variances = torch.einsum("nck,nd->ckd", shares, x.square()) / size - means.square()
        variances = variances.clamp(min=0) + MIN_VARIANCE * (mass > 0)[..., None]
        if self.covariance == "spherical":
            variances = variances.mean(-1, keepdim=True)
        return mass / mass.sum(1, keepdim=True).clamp(min=1e-12), means, variances

    def responsibilities(self, x: Tensor, label: Tensor, mixture: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """(samples, K) probability of each component of a sample's own class."""
        weights, means, variances = (part[label] for part in mixture)
        variances = variances.clamp(min=MIN_VARIANCE).expand_as(means)
        fit = ((x[:, None] - means).square() / variances + variances.log()).sum(-1)
        return (weights.clamp(min=1e-12).log() - fit / 2).softmax(-1)

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        x, y = (torch.cat(drawn) for drawn in zip(*map(self.draw, [shared] * len(ids), uploads, ids), strict=True))
        open_classes = torch.stack([upload["counts"] for upload in uploads]).sum(0) > 0
        start = logistic_regression.Head(torch.zeros_like(shared["weight"]), torch.zeros_like(shared["bias"]))
        ridges = torch.tensor([self.ridge], dtype=torch.float64)
        heads = logistic_regression.fit_ridge_path(x, y, ridges, start, open_classes).heads
        bias = torch.where(open_classes, heads.bias[0].float(), gaussian_classes.ABSENT_CLASS_LOGIT)
        # without any class the fit is undefined; a class that is not open keeps its row of zeros in any case
        return {**shared, "weight": torch.where(open_classes[:, None], heads.weight[0].float(), 0.0), "bias": bias}

    def draw(self, shared: Tensors, upload: Tensors, id: str) -> tuple[Tensor, Tensor]:
        """Draw as many embeddings of each class as the client has, from its mixtures."""
        draw = seeds.generator("fedpft", int(shared["seed"]), id)
        counts = upload["counts"].round().long()
        y = torch.repeat_interleave(torch.arange(len(counts)), counts)
        dim = upload["means"].shape[-1]
        if not len(y):
            return torch.zeros(1, dim), torch.tensor([-1])
        component = torch.multinomial(upload["weights"][y].clamp(min=1e-12), 1, generator=draw)[:, 0]
        noise = torch.randn(len(y), dim, generator=draw)
        return upload["means"][y, component] + upload["variances"][y, component].sqrt() * noise, y

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return x @ sent["weight"].mT + sent["bias"]

    def covered_classes(self, upload: Tensors) -> Tensor:
        """(classes,) True where the upload has a mixture of the class."""
        return upload["counts"] > 0

    def class_means(self, upload: Tensors) -> Tensor | None:
        """(classes, dim) class means, for an audit of what an upload reveals."""
        return torch.einsum("ck,ckd->cd", upload["weights"], upload["means"])

    name, traits = "fedpft", statistics_traits()
    send, adapt = parts.send_all, parts.no_adaptation
