"""Chooses auto's recipe without a row that is a test row where auto is reported.

python -m tools.auto.choose --stores FOLDER --seeds 3 [--sets demo]
Of every set the rows that are tested by any of the REPORTED seeds are dropped. What is left is
divided anew by seeds from FIRST on, and the test rows of these divisions judge; where a data set
has splits of its own, half of its validation rows do. Nothing else reads them.

The rule: of the recipes that are within one standard error of the one with the highest mean
accuracy over all sets (a set's columns weigh the same), the simplest. The error is that of the
paired difference to the best, over seeds within sets.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.data.table import EmbeddedTable
from fedvlm.engines.client import World, make_client
from fedvlm.engines.loop import initial_state, open_engine, run_rounds
from fedvlm.engines.state import Plan, State
from fedvlm.evaluate.protocols.contract import Training
from fedvlm.maths.logistic_regression import Head
from fedvlm.runner.prepare import Prepared
from tools.auto.fits import remembered
from tools.auto.measure import file_name, prepared_of
from tools.auto.recipes import RECIPES, SHIPPED, n_correct
from tools.auto.sets import Set, every

REPORTED = range(5)
FIRST = 200  # 100 and 101 were looked at while recipes were still added
Found = dict[str, dict[str, float]]  # accuracy by recipe and column


def untested(one: Set, seed: int) -> Set:
    """The set without the rows that any reported seed tests, and with rows to judge by."""
    rows = one.rows
    tested = np.zeros(len(rows.labels), dtype=np.bool_)
    for reported in REPORTED:
        for member in prepared_of(one, {"name": "alone"}, reported).partition.clients.values():
            tested[member.test] = True
    tested |= rows.splits == "test"
    splits = rows.splits.copy()
    held = np.flatnonzero(splits == "validation")
    drawn = np.random.default_rng(seed).permutation(held)
    splits[drawn[: len(held) // 2]] = "test"
    return replace(one, rows=kept(replace(rows, splits=splits), np.flatnonzero(~tested)))


def kept(rows: EmbeddedTable, keep: np.ndarray[tuple[int], np.dtype[np.int64]]) -> EmbeddedTable:
    return replace(
        rows,
        x=rows.x[keep],
        labels=rows.labels[keep],
        domains=rows.domains[keep],
        clients=rows.clients[keep],
        splits=rows.splits[keep],
        content=[rows.content[row] for row in keep.tolist()],
        groups=None if rows.groups is None else rows.groups[keep],
    )


def ignored(state: State, line: Mapping[str, Any]) -> None:
    """Discard the progress of a round."""


def trained_worlds(prepared: Prepared) -> Iterator[tuple[World, Training, Head]]:
    """Train auto for every training of the protocol; yield its world and the shared head."""
    for training in prepared.trainings:
        world = prepared.world(training)
        state, initial_local = initial_state(world)
        engine = open_engine("single", world, 1, world.method.rounds)
        shared = run_rounds(world, engine, Plan(training.train, ()), state, initial_local, ignored).shared
        yield world, training, Head(shared["weight"], shared["bias"])


def judged(prepared: Prepared) -> Found:
    """Return the accuracy of every recipe on the judges' samples: the mean over trainings and clients."""
    correct: dict[str, dict[str, list[float]]] = {}
    for world, training, shared in trained_worlds(prepared):
        for id in (*training.train, *training.unseen):
            if id in training.unseen and not prepared.generalises:
                continue
            test = torch.from_numpy(world.members[id].test)
            client = make_client(world, id, 0)
            for recipe in RECIPES:
                head = shared if id in training.unseen else recipe.head(shared, client, world.frozen)
                accuracy = n_correct(head, world.x[test], world.y[test]) / max(len(test), 1)
                columns = correct.setdefault(recipe.name, {})
                columns.setdefault("unseen" if id in training.unseen else "own", []).append(accuracy)
    return {
        name: {column: 100 * float(np.mean(values)) for column, values in columns.items()}
        for name, columns in correct.items()
    }


def table(found: dict[str, dict[int, Found]]) -> Iterator[str]:
    """Every set by column: accuracies, and paired differences to what ships."""
    for name, seeds in found.items():
        for column in next(iter(seeds.values()))[SHIPPED.name]:
            yield f"{name} ({column}), {len(seeds)} seeds: accuracy, less what ships, its error"
            ships = np.array([one[SHIPPED.name][column] for one in seeds.values()])
            for recipe in RECIPES:
                here = np.array([one[recipe.name][column] for one in seeds.values()])
                apart, error = float((here - ships).mean()), spread(here - ships)
                yield f"  {recipe.name:36} {here.mean():6.2f} {apart:+6.2f} {error:5.2f}"


def spread(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Standard error of a mean."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def chosen(found: dict[str, dict[int, Found]]) -> Iterator[str]:
    """Means over sets, and what the rule says."""
    by_set = {
        recipe.name: [
            np.array([np.mean(list(one[recipe.name].values())) for one in seeds.values()]) for seeds in found.values()
        ]
        for recipe in RECIPES
    }
    means = {name: float(np.mean([one.mean() for one in sets])) for name, sets in by_set.items()}
    best = max(means, key=lambda name: means[name])
    yield f"mean over {len(found)} sets, less the best ({best}), its error"
    within = []
    for name, sets in by_set.items():
        errors = [spread(mine - its) for mine, its in zip(sets, by_set[best], strict=True)]
        error = float(np.sqrt(np.sum(np.square(errors)))) / len(errors)
        yield f"  {name:36} {means[name]:6.2f} {means[name] - means[best]:+6.2f} {error:5.2f}"
        if means[name] >= means[best] - error:
            within.append(name)
    yield f"chosen: {within[0]}"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--stores", type=Path, default=Path("stores"))
    ask.add_argument("--work", type=Path, default=Path("runs/auto-choice"))
    ask.add_argument("--seeds", type=int, default=3)
    ask.add_argument("--sets", default="", help="part of a name; all by default")
    args = ask.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    found: dict[str, dict[int, Found]] = {}
    for name, opened in every(args.stores, args.work):
        if args.sets not in name:
            continue
        one: Set | None = None
        for seed in range(FIRST, FIRST + args.seeds):
            path = args.work / f"{file_name(name)}-{seed}.json"
            if not path.exists():
                one = one or opened()
                with remembered():
                    here = judged(prepared_of(untested(one, seed), {"name": "auto"}, seed))
                path.write_text(json.dumps(here))
            found.setdefault(name, {})[seed] = json.loads(path.read_text())
        for line in table({name: found[name]}):
            print(line, flush=True)
    for line in chosen(found):
        print(line)


if __name__ == "__main__":
    main()
