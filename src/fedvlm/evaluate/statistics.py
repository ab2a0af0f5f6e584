"""Test differences between runs for significance: paired bootstrap over seeds and test samples (or patients).

Two runs of the same samples, clients and seeds are compared sample by sample, so that a sample's difficulty cancels
out. A column of a table is a weighted mean of accuracies, so a difference is a sum over clients of mean differences of
samples, and samples are resampled within each client.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm import seeds
from fedvlm.evaluate.protocols.contract import Weights

Cell = tuple[str, str]  # training, client
Contributions = Mapping[str, NDArray[np.float64]]  # by client: what each of its test samples adds to a column
BOOTSTRAP_DRAWS = 4000
ERROR_RATE = 0.05  # of a confidence interval
Z_95 = 1.96  # standard errors to its ends


def sum_by_group(is_correct: NDArray[np.bool_], groups: Sequence[int] | None) -> NDArray[np.float64]:
    """Return what the bootstrap resamples: correct samples, or with groups their sums, with the same mean.

    The images of a patient are alike, so that an interval over images would be too narrow.
    """
    if groups is None:
        return is_correct.astype(np.float64)
    sums = np.bincount(np.asarray(groups, np.int64), weights=is_correct)
    return np.asarray(sums * len(sums) / len(is_correct), np.float64)


def wilson_interval(fraction: float, n: float) -> tuple[float, float]:
    """Return the 95 % interval of a fraction of n independent samples."""
    spread = Z_95**2 / n
    centre, half_width = fraction + spread / 2, Z_95 * (fraction * (1 - fraction) / n + spread / (4 * n)) ** 0.5
    return max(0.0, (centre - half_width) / (1 + spread)), min(1.0, (centre + half_width) / (1 + spread))


def weighted_correct(weights: Weights, correct: Mapping[Cell, NDArray[Any]]) -> Contributions:
    """Weight the correct predictions of one seed; a column is the sum over clients of their means."""
    out: dict[str, NDArray[np.float64]] = {}
    for (training, id), weight in weights.items():
        out[id] = out.get(id, 0.0) + weight * correct[training, id].astype(np.float64)
    return out


def column_value(rows: Contributions) -> float:
    return float(sum(contributions.mean() for contributions in rows.values()))


@dataclass(frozen=True)
class Difference:
    """Candidate minus baseline, a difference of accuracies, with its bootstrap confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        return self.low > 0 or self.high < 0


def paired_bootstrap(
    candidate: Sequence[Contributions],
    baseline: Sequence[Contributions],
    chance: float = ERROR_RATE,
    draws: int = BOOTSTRAP_DRAWS,
) -> Difference:
    """Resample seeds, and within each the samples of every client; both runs get the same draws.

    With one seed the variance between seeds is unknown: the interval covers the samples only and is too narrow.
    """
    pairs = list(zip(candidate, baseline, strict=True))
    gaps = [[of_seed[id] - base[id] for id in sorted(of_seed)] for of_seed, base in pairs]
    mean = fmean(sum(gap.mean() for gap in of_seed) for of_seed in gaps)
    draw = seeds.numbers("bootstrap", draws)
    places = draw.integers(len(gaps), size=(draws, len(gaps)))
    total = np.zeros((draws, len(gaps)))
    for number, of_seed in enumerate(gaps):
        is_drawn = places == number
        for gap in of_seed:
            # Samples of equal value are exchangeable: how often each value is drawn is multinomial.
            values, counts = np.unique(gap.round(12), return_counts=True)
            drawn = draw.multinomial(len(gap), counts / len(gap), size=int(is_drawn.sum()))
            total[is_drawn] += drawn @ values / len(gap)
    low, high = np.quantile(total.mean(1), [chance / 2, 1 - chance / 2])
    return Difference(float(mean), float(low), float(high))


def compare_with_best(
    runs: Mapping[str, Sequence[Contributions]], upper_bounds: Collection[str] = ()
) -> tuple[str, dict[str, Difference]]:
    """Return the best run, upper bounds excluded, and the difference of every other run to it.

    The intervals hold jointly (Bonferroni).
    """
    means = {name: fmean(map(column_value, per_seed)) for name, per_seed in runs.items()}
    best = max([name for name in means if name not in upper_bounds] or means, key=lambda name: means[name])
    other_names = [name for name in runs if name != best]
    return best, {name: paired_bootstrap(runs[name], runs[best], ERROR_RATE / len(other_names)) for name in other_names}
