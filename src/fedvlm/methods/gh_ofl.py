"""Gaussian classifiers from summed class statistics, in one communication round and without training.

Turazza, Picone and Mamei, The Gaussian-Head OFL Family, ICLR 2026: the closed-form heads GH-NBdiag, GH-LDA and
GH-QDAfull. FedCGS (Guan et al., CVPR 2025) is the case `classifier = "lda"`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, Tensors, register
from fedvlm.core.schema import Range, ranged_field
from fedvlm.maths import gaussian_classes
from fedvlm.methods._settings import StatisticsSettings, statistics_traits

JITTER = 1e-6  # added to every variance, as in the authors' code


@register
@dataclass(frozen=True)
class GHOFL(StatisticsSettings):
    classifier: Literal["nb", "lda", "qda"] = "lda"  # diagonal, one common or one covariance per class
    shrinkage: float = ranged_field(0.05, Range(0, 1))  # of covariances towards their mean variance ("lda", "qda")
    rounds: int = ranged_field(1, Range(1, 1))

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        classes, dim = len(frozen.classes), frozen.dim
        roots = {"nb": (classes, dim), "lda": (dim, dim), "qda": (classes, dim, dim)}[self.classifier]
        return {"means": torch.zeros(classes, dim), "root": torch.zeros(roots), "bias": torch.zeros(classes)}, {}

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        classes = len(frozen.classes)
        counts = gaussian_classes.class_membership(client.y, classes).sum(0)
        y = gaussian_classes.suppress_small_classes(client.y, counts, self.min_class_samples)
        members = gaussian_classes.class_membership(y, classes)  # (samples, classes)
        x = torch.where((y >= 0)[:, None], client.x.double(), 0.0)
        if self.classifier == "nb":
            second = members.mT @ x.square()
        elif self.classifier == "lda":
            second = gaussian_classes.gram(x)
        else:
            second = torch.stack([gaussian_classes.gram(x * of_class[:, None]) for of_class in members.unbind(1)])
        return {"counts": members.sum(0), "sums": members.mT @ x, "second": second}, local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        total = {key: torch.stack([upload[key] for upload in uploads]).sum(0) for key in uploads[0]}
        counts = total["counts"]
        means = total["sums"] / counts.clamp(min=1)[:, None]
        roots, half_log_det = self.inverse_roots(counts, means, total["second"])
        bias = (counts / counts.sum().clamp(min=1)).log() - half_log_det
        bias = torch.where(counts > 0, bias, gaussian_classes.ABSENT_CLASS_LOGIT)
        return {"means": means.float(), "root": roots.float(), "bias": bias.float()}

    def inverse_roots(self, counts: Tensor, means: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return R with R Rᵀ the inverse covariance, and half the log determinant of the covariance."""
        dim = means.shape[1]
        if self.classifier == "nb":
            variance = (second / counts.clamp(min=1)[:, None] - means.square()).clamp(min=0) + JITTER
            return variance.rsqrt(), variance.log().sum(1) / 2
        outer = counts[:, None, None] * means[:, :, None] * means[:, None, :]
        if self.classifier == "lda":
            scatter = gaussian_classes.unpack(second, dim) - outer.sum(0)
            covariance = scatter / (counts.sum() - len(counts)).clamp(min=1)
        else:
            scatter = torch.stack([gaussian_classes.unpack(packed, dim) for packed in second]) - outer
            pooled = scatter.sum(0) / (counts.sum() - len(counts)).clamp(min=1)
            own = scatter / (counts - 1).clamp(min=1)[:, None, None]
            covariance = torch.where((counts > 1)[:, None, None], own, pooled)
        eye = torch.eye(dim, dtype=means.dtype)
        mean_variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=0)[..., None, None]
        covariance = (1 - self.shrinkage) * covariance + (self.shrinkage * mean_variance + JITTER) * eye
        values, vectors = torch.linalg.eigh(covariance)
        values = values.clamp(min=JITTER)
        half_log_det = values.log().sum(-1) / 2
        return vectors * values.rsqrt()[..., None, :], half_log_det.expand(len(counts))

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        if self.classifier == "lda":
            whitened = (x[:, None] - sent["means"]) @ sent["root"]
        elif self.classifier == "nb":
            whitened = (x[:, None] - sent["means"]) * sent["root"]
        else:
            whitened = torch.einsum("ncd,cde->nce", x[:, None] - sent["means"], sent["root"])
        return sent["bias"] - whitened.square().sum(-1) / 2

    def covered_classes(self, upload: Tensors) -> Tensor:
        """(classes,) True where the upload has statistics of the class."""
        return upload["counts"] > 0

    def class_means(self, upload: Tensors) -> Tensor | None:
        """(classes, dim) class means, for an audit of what an upload reveals."""
        return upload["sums"] / upload["counts"].clamp(min=1)[:, None]

    name, traits = "gh-ofl", statistics_traits("total")
    send, adapt = parts.send_all, parts.no_adaptation
