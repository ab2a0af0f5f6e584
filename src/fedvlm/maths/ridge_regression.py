"""Ridge regression of class indicators on embeddings, towards a given head, from sums over samples.

The objective is the mean of |W x + b - e_y|² over the samples plus ridge · |W - W_anchor|², without a penalty on the
bias. It depends on the samples only through counts, class sums and Σ x xᵀ, which add up over clients: the solution
from summed statistics is the one from pooled samples.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.maths.logistic_regression import Head


class Statistics(NamedTuple):
    """Sums over samples; those of several clients add up."""

    counts: Tensor  # (classes,)
    sums: Tensor  # (classes, dim) of the embeddings of each class
    second: Tensor  # (dim, dim) Σ x xᵀ


class Path(NamedTuple):
    """The solutions for all ridges at once, in the eigenbasis of the samples' covariance."""

    anchor: Tensor  # (classes, dim) the head at an infinite ridge
    change: Tensor  # (classes, dim) what is divided by (eigenvalue + ridge), in the basis
    basis: Tensor  # (dim, dim), columns
    eigenvalues: Tensor  # (dim,)
    mean: Tensor  # (dim,) of the embeddings
    frequencies: Tensor  # (classes,)

    def head(self, ridge: Tensor | float) -> Head:
        weight = self.anchor + (self.change / (self.eigenvalues + ridge)) @ self.basis.mT
        return Head(weight, self.frequencies - weight @ self.mean)

    def outputs(self, x: Tensor, ridges: Tensor) -> Tensor:
        """(ridges, samples, classes) W x + b for every ridge."""
        x = x - self.mean
        inverses = 1 / (self.eigenvalues + ridges[:, None])
        changes = (x @ self.basis * inverses[:, None]) @ self.change.mT
        return x @ self.anchor.mT + changes + self.frequencies


def solve_path(statistics: Statistics, text_head: Tensor | None) -> Path:
    """Solve for all ridges; the anchor is the multiple of `text_head` that fits the samples best.

    A class without samples keeps the anchor's weights: its samples may have been too few to be uploaded.
    """
    counts, sums, second = (part.double() for part in statistics)
    n_samples = counts.sum()
    divisor = n_samples.clamp(min=1)
    mean, has_samples = sums.sum(0) / divisor, counts > 0
    frequencies = torch.where(has_samples, counts / divisor, 1 / (n_samples + len(counts)))
    covariance = second / divisor - torch.outer(mean, mean)
    covariance = (covariance + covariance.mT) / 2
    cross = (sums / divisor - torch.outer(frequencies, mean)) * has_samples[:, None]  # (classes, dim)
    anchor = torch.zeros_like(cross)
    if text_head is not None:
        observed = text_head.double() * has_samples[:, None]
        variance = (observed @ covariance * observed).sum()  # of the text logits over the samples
        slope = ((observed * cross).sum() / variance.clamp(min=1e-12)).clamp(min=0)
        anchor = text_head.double() * torch.where(n_samples > 0, slope, 1.0)
    eigenvalues, basis = torch.linalg.eigh(covariance)
    change = (cross - anchor @ covariance) @ basis * has_samples[:, None]
    return Path(anchor, change, basis, eigenvalues.clamp(min=0), mean, frequencies)


def class_log_prior(
    counts: Tensor, frequencies: Tensor, strengths: Tensor, probabilities: Tensor | None = None
) -> Tensor:
    """(classes,) log of a client's expected class frequencies, relative to those of the federation.

    The prior is a Dirichlet distribution around the federation's frequencies. Its strength is averaged over
    `strengths` by the marginal likelihood of the client's own counts, so few samples change little. `probabilities`
    are those of the strengths before the counts are seen, equal if not given.
    """
    centre = (frequencies + 1 / len(frequencies)) / 2  # no class is impossible
    concentration = strengths[:, None] * centre  # (strengths, classes)
    n_samples = counts.sum()
    log_evidence = torch.lgamma(strengths) - torch.lgamma(strengths + n_samples)
    log_evidence = log_evidence + (torch.lgamma(concentration + counts) - torch.lgamma(concentration)).sum(1)
    if probabilities is not None:
        log_evidence = log_evidence + probabilities.log()
    expected = (concentration + counts) / (strengths + n_samples)[:, None]
    return (log_evidence.softmax(0) @ expected).log() - centre.log()
