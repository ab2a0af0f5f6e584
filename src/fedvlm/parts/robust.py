"""Robust means of (clients, values), every client with the same weight.

Row counts have no say here: they are the clients' own claims. `krum` and `geometric_median` are
shares of the clients that follow from the dots between them, so large uploads need no second copy.
"""

from collections.abc import Callable

import torch
from torch import Tensor

TRIM_FRACTION = 0.3  # of the clients, cut off at either end
WEISZFELD_STEPS = 100  # iterations of Weiszfeld's algorithm for the geometric median
MIN_RELATIVE_DISTANCE = 1e-9  # smaller distances are clamped, relative to the median distance


def mean(x: Tensor) -> Tensor:
    return x.mean(dim=0)


def median(x: Tensor) -> Tensor:
    """Return the coordinate-wise median; of an even count the mean of the two in the middle."""
    ordered = x.sort(dim=0).values
    count = len(x)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def trimmed_mean(x: Tensor) -> Tensor:
    """Return the coordinate-wise mean without the largest and the smallest 30 % of the clients."""
    cut = int(TRIM_FRACTION * len(x))
    return x.sort(dim=0).values[cut : len(x) - cut].mean(dim=0)


def krum(x: Tensor) -> Tensor:
    """Return the upload that is nearest to its neighbours, of as many as are certainly honest."""
    return weighted_mean(krum_weights, x)


def geometric_median(x: Tensor) -> Tensor:
    """Return the point with the least sum of distances to all uploads."""
    return weighted_mean(geometric_median_weights, x)


def weighted_mean(weights_from_dots: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    origin = median(x)
    centred = (x - origin).double()
    return origin + (weights_from_dots(centred @ centred.mT) @ centred).to(x.dtype)


def krum_weights(dots: Tensor) -> Tensor:
    """Return (clients,) weights: 1 for the selected client; equal weights for fewer than three."""
    count = len(dots)
    if count < 3:
        return torch.full((count,), 1 / count, dtype=dots.dtype)
    attackers = (count - 3) // 2  # the most that the rule tolerates
    neighbour_distances = distances(dots).sort(dim=1).values[:, 1 : count - attackers - 1]
    scores = neighbour_distances.square().sum(dim=1)
    best = (scores == scores.min()).to(dots.dtype)  # ties are averaged, whatever their order
    return best / best.sum()


def geometric_median_weights(dots: Tensor) -> Tensor:
    """Return (clients,) weights by Weiszfeld's algorithm, started at the half nearest to the others."""
    pairwise = distances(dots)
    closeness = pairwise.median(dim=1).values
    weights = (closeness <= closeness.median()).to(dots.dtype)
    weights = weights / weights.sum()
    min_distance = max(MIN_RELATIVE_DISTANCE * float(pairwise.median()), 1e-100)
    for _ in range(WEISZFELD_STEPS):
        projections = dots @ weights
        square = dots.diagonal() - 2 * projections + weights @ projections
        weights = 1 / square.clamp(min=0).sqrt().clamp(min=min_distance)
        weights = weights / weights.sum()
    return weights


def distances(dots: Tensor) -> Tensor:
    """Return distances (clients, clients) from the dot products, clamped at 0."""
    size = dots.diagonal()
    return (size[:, None] + size - 2 * dots).clamp(min=0).fill_diagonal_(0).sqrt()


ROBUST_MEANS: dict[str, Callable[[Tensor], Tensor]] = {"mean": mean, "median": median, "trimmed": trimmed_mean}
ROBUST_MEANS |= {"krum": krum, "geometric-median": geometric_median}
WEIGHTS_FROM_DOTS = {"krum": krum_weights, "geometric-median": geometric_median_weights}
