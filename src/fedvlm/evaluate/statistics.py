"""Which differences between runs are more than chance: paired bootstrap over seeds and test rows.

Two runs of the same rows, clients and seeds are compared row by row: what makes a test row hard for
both cancels out. A column of a table is a weighted mean of shares of hits, so its difference is a
sum over clients of mean differences of rows, and rows are drawn again within each client.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from fedvlm import seeds
from fedvlm.evaluate.protocols.contract import Weights

Cell = tuple[str, str]  # training, client
Contributions = Mapping[str, NDArray[np.float64]]  # by client: what each of its test rows adds
BOOTSTRAP_DRAWS = 4000
ERROR_RATE = 0.05  # that an interval leaves out the true difference


def weighted_correct(weights: Weights, correct: Mapping[Cell, NDArray[np.bool_]]) -> Contributions:
    """One seed's column by client: the sum over clients of the mean of these is its number."""
    out: dict[str, NDArray[np.float64]] = {}
    for (training, id), weight in weights.items():
        out[id] = out.get(id, 0.0) + weight * correct[training, id].astype(np.float64)
    return out


def column_value(rows: Contributions) -> float:
    return float(sum(contributions.mean() for contributions in rows.values()))


@dataclass(frozen=True)
class Difference:
    """Ours less theirs, a share of hits, with the interval that bootstrap gives it."""

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
    """Seeds are drawn again, and in each the rows of every client; both runs get the same draws.

    One seed cannot say how much seeds differ: its interval is of the rows alone, and too narrow.
    """
    gaps = [
        [candidate_seed[id] - baseline_seed[id] for id in sorted(candidate_seed)]
        for candidate_seed, baseline_seed in zip(candidate, baseline, strict=True)
    ]
    mean = fmean(sum(gap.mean() for gap in of_seed) for of_seed in gaps)
    draw = seeds.numbers("bootstrap", draws)
    places = draw.integers(len(gaps), size=(draws, len(gaps)))
    total = np.zeros((draws, len(gaps)))
    for number, of_seed in enumerate(gaps):
        is_drawn = places == number
        for gap in of_seed:
            # Rows of the same value are alike: how often each value is drawn is multinomial.
            values, counts = np.unique(gap.round(12), return_counts=True)
            drawn = draw.multinomial(len(gap), counts / len(gap), size=int(is_drawn.sum()))
            total[is_drawn] += drawn @ values / len(gap)
    low, high = np.quantile(total.mean(1), [chance / 2, 1 - chance / 2])
    return Difference(float(mean), float(low), float(high))


def compare_with_best(
    runs: Mapping[str, Sequence[Contributions]], upper_bounds: Collection[str] = ()
) -> tuple[str, dict[str, Difference]]:
    """The run with the largest mean, upper bounds aside, and the difference of every other one to it.

    The intervals hold together: each leaves its difference out with the chance shared among them.
    """
    means = {name: fmean(map(column_value, per_seed)) for name, per_seed in runs.items()}
    best = max([name for name in means if name not in upper_bounds] or means, key=lambda name: means[name])
    other_names = [name for name in runs if name != best]
    return best, {name: paired_bootstrap(runs[name], runs[best], ERROR_RATE / len(other_names)) for name in other_names}
