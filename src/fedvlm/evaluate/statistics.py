"""Which differences between runs are more than chance: paired bootstrap over seeds and test rows.

Two runs of the same rows, clients and seeds are compared row by row: what makes a test row hard for
both cancels out. A column of a table is a weighted mean of shares of hits, so its difference is a
sum over clients of mean differences of rows, and rows are drawn again within each client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from fedvlm import seeds
from fedvlm.evaluate.protocols.contract import Weights

Cell = tuple[str, str]  # training, client
Added = Mapping[str, NDArray[np.float64]]  # by client: what each of its test rows adds
DRAWS = 4000
CHANCE = 0.05  # that an interval leaves out the true difference


def rows_of(weights: Weights, hits: Mapping[Cell, NDArray[np.bool_]]) -> Added:
    """One seed's column by client: the sum over clients of the mean of these is its number."""
    out: dict[str, NDArray[np.float64]] = {}
    for (training, id), weight in weights.items():
        out[id] = out.get(id, 0.0) + weight * hits[training, id].astype(np.float64)
    return out


def value(rows: Added) -> float:
    return float(sum(one.mean() for one in rows.values()))


@dataclass(frozen=True)
class Difference:
    """Ours less theirs, a share of hits, with the interval that bootstrap gives it."""

    mean: float
    low: float
    high: float

    @property
    def told_apart(self) -> bool:
        return self.low > 0 or self.high < 0


def paired(
    ours: Sequence[Added], theirs: Sequence[Added], chance: float = CHANCE, draws: int = DRAWS
) -> Difference:
    """Seeds are drawn again, and in each the rows of every client; both runs get the same draws.

    One seed cannot say how much seeds differ: its interval is of the rows alone, and too narrow.
    """
    gaps = [
        [one[id] - other[id] for id in sorted(one)] for one, other in zip(ours, theirs, strict=True)
    ]
    mean = fmean(sum(gap.mean() for gap in of_seed) for of_seed in gaps)
    draw = seeds.numbers("bootstrap", draws)
    places = draw.integers(len(gaps), size=(draws, len(gaps)))
    total = np.zeros((draws, len(gaps)))
    for number, of_seed in enumerate(gaps):
        mine = places == number
        for gap in of_seed:
            # Rows of the same value are alike: how often each value is drawn is multinomial.
            values, counts = np.unique(gap.round(12), return_counts=True)
            drawn = draw.multinomial(len(gap), counts / len(gap), size=int(mine.sum()))
            total[mine] += drawn @ values / len(gap)
    low, high = np.quantile(total.mean(1), [chance / 2, 1 - chance / 2])
    return Difference(float(mean), float(low), float(high))


def ties(runs: Mapping[str, Sequence[Added]]) -> tuple[str, dict[str, Difference]]:
    """The run with the largest mean, and what every other one lacks.

    The intervals hold together: each leaves its difference out with the chance shared among them.
    """
    means = {name: fmean(map(value, one)) for name, one in runs.items()}
    best = max(means, key=lambda name: means[name])
    others = [name for name in runs if name != best]
    return best, {name: paired(runs[name], runs[best], CHANCE / len(others)) for name in others}
