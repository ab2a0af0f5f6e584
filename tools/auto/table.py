"""What tools.auto.measure found, as Markdown: accuracies, paired differences, and what it costs.

python -m tools.auto.table --stores FOLDER [--work FOLDER]
A row is over the seeds that auto has; a method without all of them is left out. Intervals are where
95 % of bootstrap draws over seeds and test rows have the difference.
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


def share(groups: Groups) -> float:
    """Mean over seeds of the mean over clients."""
    return float(np.mean([np.mean([rows.mean() for rows in seed]) for seed in groups]))


def drawn(groups: Groups, draw: np.random.Generator) -> Groups:
    """A bootstrap draw of the seeds, and of the rows of each client."""
    seeds = [groups[seed] for seed in draw.integers(0, len(groups), len(groups))]
    return [[rows[draw.integers(0, len(rows), len(rows))] for rows in seed] for seed in seeds]


def interval(first: Groups, second: Groups) -> tuple[float, float, float]:
    """Mean difference, and where 95 % of bootstrap draws over seeds and rows have it (paired)."""
    apart = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    draw = np.random.default_rng(0)
    many = [share(drawn(apart, draw)) for _ in range(DRAWS)]
    low, high = np.quantile(many, (0.025, 0.975))
    return 100 * share(apart), 100 * float(low), 100 * float(high)


Found = dict[str, dict[int, dict[str, Any]]]  # what was measured, by method and seed


def found_in(work: Path, name: str) -> Found:
    """The seeds that auto was measured by, of the methods that have them all."""
    found: Found = {}
    for method in METHODS:
        paths = sorted(work.glob(f"{file_name(name)}-{method}-*.json"))
        seeds = {int(path.stem.rpartition("-")[2]): json.loads(path.read_text()) for path in paths}
        if any(seeds.values()):
            found[method] = seeds
    common = sorted(found.get("auto", {}))
    return {
        method: {seed: seeds[seed] for seed in common}
        for method, seeds in found.items()
        if common and seeds.keys() >= set(common)
    }


def groups_of(found: Found, column: str) -> dict[str, Groups]:
    """Hits by method, of methods that have the column."""
    return {
        name: [[np.array(list(text), dtype=np.float64) for text in one["hits"][column]] for one in seeds.values()]
        for name, seeds in found.items()
        if all(column in one["hits"] for one in seeds.values())
    }


def rows(name: str, chance: float, found: Found) -> Iterator[tuple[str, dict[str, float]]]:
    """A line of the table for each column, and its accuracies; `chance` is one of the classes."""
    for column in ("unseen", "own"):
        groups = groups_of(found, column)
        if "auto" not in groups or len(groups) < 2:
            continue
        seen = {key: 100 * share(one) for key, one in groups.items()}
        best = max((key for key in seen if key != "auto"), key=lambda key: seen[key])
        gap, low, high = interval(groups["auto"], groups[best])
        cells = [f"{seen[key]:.1f}" if key in seen else "-" for key in METHODS]
        last = f"{gap:+.2f} [{low:+.2f}, {high:+.2f}] {best}"
        cells = [name, column, str(len(found["auto"])), f"{100 * chance:.1f}", *cells, last]
        yield "| " + " | ".join(cells) + " |", seen


def costs(every_set: list[Found]) -> Iterator[str]:
    """Mean over the sets that a method was measured on."""
    for method in METHODS:
        runs = [one for found in every_set for one in found.get(method, {}).values()]
        if runs:
            size, exchanges, seconds, tuning = (
                float(np.mean([one[key] for one in runs])) for key in ("bytes", "exchanges", "seconds", "tuning")
            )
            cells = f"{size / 1e3:.0f} | {exchanges:.0f} | {seconds:.1f} | {tuning:.1f}"
            yield f"| {method} | {cells} | {len(runs)} |"


def against(columns: list[dict[str, float]], other: str) -> str:
    both = [one["auto"] - one[other] for one in columns if other in one]
    worse = sum(gap < 0 for gap in both)
    mean = float(np.mean(both)) if both else float("nan")
    return f"auto less {other}: {mean:+.2f} on average over {len(both)} columns, below in {worse}"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--stores", type=Path, default=Path("stores"))
    ask.add_argument("--work", type=Path, default=Path("runs/auto"))
    args = ask.parse_args()
    sets = dict(every(args.stores, args.work))
    every_set = {name: found_in(args.work, name) for name in sets}
    print("| data | column | seeds | chance | " + " | ".join(METHODS) + " | auto - best other |")
    print("|---" * (len(METHODS) + 5) + "|")
    columns = []
    for name, found in every_set.items():
        if not found:
            continue
        for line, seen in rows(name, 1 / len(sets[name]().rows.classes), found):
            print(line)
            columns.append(seen)
    print("\n| method | kB a client | exchanges | CPU seconds | seconds to tune | runs |")
    print("|---" * 6 + "|")
    print("\n".join(costs(list(every_set.values()))))
    print("\n" + "\n".join(against(columns, other) for other in METHODS if other != "auto"))


if __name__ == "__main__":
    main()
