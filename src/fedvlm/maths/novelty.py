"""Score how unlike the samples of a site an embedding is, and reject it at a given rate of false rejections.

The score is the smallest squared Mahalanobis distance to a class mean of the site's training samples. All classes share
one covariance: its leading directions as they are, one variance for all others, drawn to the mean variance by
d/(n + d) for n samples of dimension d. A limit from samples that this fit has not used rejects a further sample of
the same distribution with probability `rate`, up to interpolation between two samples.
"""

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.errors import DataError

N_DIRECTIONS = 64  # as good as all directions on validation samples of demo, digits, PACS and pets
FALSE_REJECTIONS = 0.05  # of the site's own images
MAX_SAMPLES = 5000  # that a site's means and covariance are fitted on
MIN_VARIANCE = 1e-9  # of a unit-norm embedding


class Novelty(NamedTuple):
    means: Tensor  # (classes with samples, dim)
    directions: Tensor  # (directions, dim) orthonormal
    variances: Tensor  # (directions + 1,) along them, and along every other direction
    held_out_scores: Tensor  # (n,) of validation and calibration samples

    def scores(self, x: Tensor) -> Tensor:
        """Return a score per embedding of (samples, dim); higher is stranger."""
        x, means = self._whiten(pooled_embeddings(x)), self._whiten(self.means)
        distances = x.square().sum(1, keepdim=True) - 2 * x @ means.mT + means.square().sum(1)
        return distances.amin(1).clamp(min=0).float()

    def _whiten(self, x: Tensor) -> Tensor:
        """Return (samples, directions + dim) coordinates in which all variances are 1."""
        x, directions, roots = x.double(), self.directions.double(), self.variances.double().sqrt()
        along = x @ directions.mT
        return torch.cat([along / roots[:-1], (x - along @ directions) / roots[-1]], dim=1)

    def limit(self, rate: float = FALSE_REJECTIONS) -> float:
        """Return the largest score that is not rejected."""
        count, required = len(self.held_out_scores), ceil(1 / rate - 1 - 1e-9)
        if count < required:
            needs = f"{rate:.0%} of familiar images needs {required} validation samples"
            raise DataError(f"rejecting {needs}, got {count}; train with more of them, or do not reject")
        ordered = self.held_out_scores.double().sort().values
        place = (count + 1) * (1 - rate) - 1  # between two samples, so that the mean rate is `rate` and not below it
        low = min(int(place + 1e-9), count - 1)
        return float(ordered[low] + (place - low) * (ordered[min(low + 1, count - 1)] - ordered[low]))


def pooled_embeddings(x: Tensor) -> Tensor:
    """Return unit-norm embeddings (samples, dim) of pooled embeddings, or of the mean over patches."""
    return torch.nn.functional.normalize(x.float().mean(1) if x.ndim == 3 else x.float(), dim=1)


def fit_novelty(x: Tensor, y: Tensor, held_out_x: Tensor) -> Novelty | None:
    """Fit on training samples (samples, dim) and held-out ones; return None of pixels or too few samples."""
    if x.ndim > 3 or len(x) < 2 or not len(held_out_x):
        return None
    step = ceil(len(x) / MAX_SAMPLES)
    x, y = pooled_embeddings(x[::step]), y[::step]
    classes, index = torch.unique(y, return_inverse=True)
    means = torch.stack([x[index == number].mean(0) for number in range(len(classes))])
    n_samples, dim = x.shape
    count = min(N_DIRECTIONS, n_samples, dim - 1)
    variances, directions = principal_directions((x - means[index]).double(), count)
    mean_variance = variances.sum() / dim
    rest = (variances[count:].sum() / (dim - count)).reshape(1)
    shrinkage = dim / (n_samples + dim)
    shrunk = (1 - shrinkage) * torch.cat([variances[:count], rest]) + shrinkage * mean_variance
    unscored = Novelty(means, directions.float(), shrunk.clamp(min=MIN_VARIANCE).float(), torch.zeros(0))
    return unscored._replace(held_out_scores=unscored.scores(held_out_x))


def principal_directions(deviations: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the variances along all principal directions, and the (count, dim) leading directions.

    They come from the smaller of both Gram matrices, because a singular value decomposition takes several times longer.
    """
    n_samples, dim = deviations.shape
    is_tall = n_samples > dim
    values, vectors = torch.linalg.eigh(deviations.mT @ deviations if is_tall else deviations @ deviations.mT)
    leading = vectors.flip(1)[:, :count]
    directions = leading if is_tall else torch.linalg.qr(deviations.mT @ leading).Q  # orthonormal without variance, too
    return values.flip(0).clamp(min=0) / n_samples, directions.mT
