"""What tools.auto.measure found, as Markdown: accuracies, paired differences, and what it costs.

python -m tools.auto.table --stores FOLDER [--work FOLDER]
python -m tools.auto.table --stores FOLDER --work FOLDER --before FOLDER
A row is over the seeds that auto has; a method without all of them is left out. Intervals are where
95 % of bootstrap draws over seeds and test rows have the difference. `--before` has measurements of an older auto, and
the table is of auto before and after, by the seeds that both have.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.auto.measure import METHODS, file_name
from tools.auto.sets import every

DRAWS = 2000  # of the bootstrap
Groups = list[list[NDArray[np.float64]]]  # hits by seed and client


def mean_accuracy(groups: Groups) -> float:
    """Mean over seeds of the mean over clients."""
    return float(np.mean([np.mean([rows.mean() for rows in seed]) for seed in groups]))


def drawn(groups: Groups, draw: np.random.Generator) -> Groups:
    """A bootstrap draw of the seeds, and of the rows of each client."""
    seeds = [groups[seed] for seed in draw.integers(0, len(groups), len(groups))]
    return [[rows[draw.integers(0, len(rows), len(rows))] for rows in seed] for seed in seeds]


def interval(first: Groups, second: Groups) -> tuple[float, float, float]:
    """Mean difference, and where 95 % of bootstrap draws over seeds and rows have it (paired)."""
    differences = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    draw = np.random.default_rng(0)
    means = [mean_accuracy(drawn(differences, draw)) for _ in range(DRAWS)]
    low, high = np.quantile(means, (0.025, 0.975))
    return 100 * mean_accuracy(differences), 100 * float(low), 100 * float(high)


Measurements = dict[str, dict[int, dict[str, Any]]]  # what was measured, by method and seed


def found_in(work: Path, name: str) -> Measurements:
    """The seeds that auto was measured by, of the methods that have them all."""
    measurements: Measurements = {}
    for method in METHODS:
        paths = sorted(work.glob(f"{file_name(name)}-{method}-*.json"))
        seeds = {int(path.stem.rpartition("-")[2]): json.loads(path.read_text()) for path in paths}
        if any(seeds.values()):
            measurements[method] = seeds
    common = sorted(measurements.get("auto", {}))
    return {
        method: {seed: seeds[seed] for seed in common}
        for method, seeds in measurements.items()
        if common and seeds.keys() >= set(common)
    }


def groups_of(measurements: Measurements, column: str) -> dict[str, Groups]:
    """Hits by method, of methods that have the column."""
    return {
        name: [
            [np.array(list(text), dtype=np.float64) for text in measurement["correct"][column]]
            for measurement in seeds.values()
        ]
        for name, seeds in measurements.items()
        if all(column in measurement["correct"] for measurement in seeds.values())
    }


def rows(name: str, chance: float, measurements: Measurements) -> Iterator[tuple[str, dict[str, float]]]:
    """A line of the table for each column, and its accuracies; `chance` is one of the classes."""
    for column in ("unseen", "own"):
        groups = groups_of(measurements, column)
        if "auto" not in groups or len(groups) < 2:
            continue
        accuracies = {key: 100 * mean_accuracy(groups_of_method) for key, groups_of_method in groups.items()}
        best = max((key for key in accuracies if key != "auto"), key=lambda key: accuracies[key])
        gap, low, high = interval(groups["auto"], groups[best])
        cells = [f"{accuracies[key]:.1f}" if key in accuracies else "-" for key in METHODS]
        last = f"{gap:+.2f} [{low:+.2f}, {high:+.2f}] {best}"
        cells = [name, column, str(len(measurements["auto"])), f"{100 * chance:.1f}", *cells, last]
        yield "| " + " | ".join(cells) + " |", accuracies


def costs(every_set: list[Measurements]) -> Iterator[str]:
    """Mean over the sets that a method was measured on."""
    for method in METHODS:
        runs = [measurement for measurements in every_set for measurement in measurements.get(method, {}).values()]
        if runs:
            size, exchanges, seconds, tuning = (
                float(np.mean([measurement[key] for measurement in runs]))
                for key in ("bytes", "exchanges", "seconds", "tuning")
            )
            cells = f"{size / 1e3:.0f} | {exchanges:.0f} | {seconds:.1f} | {tuning:.1f}"
            yield f"| {method} | {cells} | {len(runs)} |"


def against(columns: list[dict[str, float]], reference: str) -> str:
    differences = [accuracies["auto"] - accuracies[reference] for accuracies in columns if reference in accuracies]
    worse = sum(gap < 0 for gap in differences)
    mean = float(np.mean(differences)) if differences else float("nan")
    return f"auto less {reference}: {mean:+.2f} on average over {len(differences)} columns, below in {worse}"


def before_and_after(names: list[str], before: Path, after: Path) -> Iterator[str]:
    """Lines of a table of two versions of auto: accuracies, and the paired difference."""
    yield "| data | column | seeds | before | after | difference |"
    yield "|---" * 6 + "|"
    gaps = []
    for name in names:
        old, new = (found_in(folder, name).get("auto", {}) for folder in (before, after))
        seeds = sorted(set(old) & set(new))
        for column in ("unseen", "own"):
            pair = [groups_of({"auto": {seed: runs[seed] for seed in seeds}}, column) for runs in (old, new)]
            if seeds and all("auto" in groups for groups in pair):
                first, second = (groups["auto"] for groups in pair)
                gap, low, high = interval(second, first)
                gaps.append(gap)
                accuracies = " | ".join(f"{100 * mean_accuracy(groups):.1f}" for groups in (first, second))
                yield f"| {name} | {column} | {len(seeds)} | {accuracies} | {gap:+.2f} [{low:+.2f}, {high:+.2f}] |"
    if gaps:
        yield f"| mean of {len(gaps)} columns | | | | | {np.mean(gaps):+.2f}, lowest {min(gaps):+.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", type=Path, default=Path("stores"))
    parser.add_argument("--work", type=Path, default=Path("runs/auto"))
    parser.add_argument("--before", type=Path)
    args = parser.parse_args()
    if args.before:
        print("\n".join(before_and_after([name for name, _ in every(args.stores, args.work)], args.before, args.work)))
        return
    sets = dict(every(args.stores, args.work))
    every_set = {name: found_in(args.work, name) for name in sets}
    print("| data | column | seeds | chance | " + " | ".join(METHODS) + " | auto - best other |")
    print("|---" * (len(METHODS) + 5) + "|")
    columns = []
    for name, measurements in every_set.items():
        if not measurements:
            continue
        for line, accuracies in rows(name, 1 / len(sets[name]().rows.classes), measurements):
            print(line)
            columns.append(accuracies)
    print("\n| method | kB a client | exchanges | CPU seconds | seconds to tune | runs |")
    print("|---" * 6 + "|")
    print("\n".join(costs(list(every_set.values()))))
    print("\n" + "\n".join(against(columns, reference) for reference in METHODS if reference != "auto"))


if __name__ == "__main__":
    main()
