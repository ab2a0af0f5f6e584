"""Measure what images without a label add to auto where labels are few, or choose how it uses them.

python -m tools.auto.unlabelled --stores FOLDER --seeds 5 [--sets demo] [--foreign]
python -m tools.auto.unlabelled --stores FOLDER --seeds 2 --choose
python -m tools.auto.unlabelled --stores FOLDER --plot docs/pictures/unlabelled.svg
Each client keeps 2, 4 or 8 labels a class, half of them for validation; its other training samples have no label. With
`--foreign` only half of the classes are of the task, and as many images of the others are mixed in. `--choose` drops
what a reported seed tests (tools.auto.choose) and compares the recipes by seeds from 200 on.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedvlm.data.partition import ClientSplit
from fedvlm.data.table import UNLABELLED
from fedvlm.engines.client import make_client
from fedvlm.maths.head_mixing import MixPrior
from fedvlm.maths.unlabelled import MixturePrior
from fedvlm.runner.prepare import Prepared
from tools.auto.choose import FIRST, trained_worlds, untested
from tools.auto.fits import remembered
from tools.auto.measure import file_name, prepared_of
from tools.auto.recipes import Recipe
from tools.auto.sets import Set, every
from tools.auto.table import Groups, interval, mean_accuracy

LABELS = (2, 4, 8)  # of a class at a client
WITHOUT, WITH = "without", "with"
RECIPES = {  # from the simplest
    "1 step": MixturePrior(steps=1, useless=0.5),
    "1 step, useless by 0.8": MixturePrior(steps=1, useless=0.8),
    "the same, hardly any background": MixturePrior(
        steps=1, useless=0.8, background=1e-3, max_background=1e-3, min_background=0.0
    ),
    "2 steps, useless by 0.8": MixturePrior(steps=2, useless=0.8),
}
Correct = dict[str, list[str]]  # by recipe: 0 and 1 of the test samples of each client


def with_foreign(data_set: Set) -> Set:
    """Return the set with half of its classes; samples of the others have no label."""
    rows, n_classes = data_set.rows, -(-len(data_set.rows.classes) // 2)
    labels = np.where(rows.labels < n_classes, rows.labels, UNLABELLED)
    keep = np.flatnonzero((labels >= 0) | np.isin(rows.splits, ("", "train")))
    text = None if rows.text is None else rows.text[:n_classes]
    rows = replace(rows, classes=rows.classes[:n_classes], labels=labels, text=text, patches=None)
    return replace(data_set, rows=rows.select(keep))


def few_labels(prepared: Prepared, n_labels: int) -> Prepared:
    """Return the clients with few labels a class; as many foreign samples as others have no label."""
    draw, labels = np.random.default_rng(prepared.seed), prepared.rows.labels
    members: dict[str, ClientSplit] = {}
    for id, member in prepared.partition.clients.items():
        parts: dict[str, list[int]] = {"train": [], "validation": [], "unlabelled": []}
        for label in np.unique(labels[np.concatenate([member.train, member.validation])]):
            train, validation = (
                draw.permutation(rows[labels[rows] == label]).tolist() for rows in (member.train, member.validation)
            )
            half = n_labels // 2
            n_borrowed = max(half - len(validation), 0)
            parts["train"] += train[:half]
            parts["validation"] += validation[:half] + train[half : half + n_borrowed]
            parts["unlabelled"] += train[half + n_borrowed :]
        parts["unlabelled"] += draw.permutation(member.unlabelled)[: len(parts["unlabelled"])].tolist()
        members[id] = replace(member, **{split: np.array(rows, np.int64) for split, rows in parts.items()})
    return replace(prepared, partition=replace(prepared.partition, clients=members))


def measure(prepared: Prepared, recipes: dict[str, MixturePrior]) -> Correct:
    """Return the correct test samples of every client that trains, without and with samples that have no label."""
    correct: Correct = {}
    for world, training, shared in trained_worlds(prepared):
        for id in training.train:
            client, test = make_client(world, id, 0), torch.from_numpy(world.members[id].test)
            labelled_only = replace(client, unlabelled=client.unlabelled[:0])
            heads = {WITHOUT: Recipe(WITHOUT, MixPrior()).head(shared, labelled_only, world.frozen)}
            for name, mixture in recipes.items():
                heads[name] = Recipe(name, MixPrior(mixture=mixture)).head(shared, client, world.frozen)
            for name, head in heads.items():
                right = head.logits(world.x[test].double()).argmax(1) == world.y[test]
                correct.setdefault(name, []).append("".join(map(str, right.int().tolist())))
    return correct


def groups_of(runs: list[Correct], name: str) -> Groups:
    return [[np.array(list(text), dtype=np.float64) for text in run[name] if text] for run in runs]


def lines(found: dict[tuple[str, int], list[Correct]], names: list[str]) -> Iterator[str]:
    """Return a Markdown table: accuracy without, and the paired difference of each recipe with its interval."""
    yield "| data | labels | seeds | without | " + " | ".join(names) + " |"
    yield "|---" * (4 + len(names)) + "|"
    gains: dict[tuple[int, str], list[float]] = {}
    for (data, n_labels), runs in found.items():
        without, cells = groups_of(runs, WITHOUT), []
        for name in names:
            gain, low, high = interval(groups_of(runs, name), without)
            gains.setdefault((n_labels, name), []).append(gain)
            cells.append(f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]")
        accuracy = f"{100 * mean_accuracy(without):.1f}"
        yield f"| {data} | {n_labels} | {len(runs)} | {accuracy} | " + " | ".join(cells) + " |"
    for n_labels in LABELS:
        cells = [
            f"{np.mean(gains[n_labels, name]):+.2f}, lowest {min(gains[n_labels, name]):+.2f}"
            for name in names
            if (n_labels, name) in gains
        ]
        if cells:
            yield f"| mean | {n_labels} | | | " + " | ".join(cells) + " |"


def plot(found: dict[tuple[str, int], list[Correct]], path: Path) -> None:
    """Draw the accuracy over labels, with and without samples that have no label, one panel a set."""
    from matplotlib import pyplot

    names = sorted({data for data, _ in found})
    columns = 4
    figure, axes = pyplot.subplots(-(-len(names) // columns), columns, figsize=(12, 9), squeeze=False)
    for panel, data in zip(axes.flat, names, strict=False):
        points = [n_labels for n_labels in LABELS if (data, n_labels) in found]
        for name, style in ((WITHOUT, "o--"), (WITH, "o-")):
            values = [100 * mean_accuracy(groups_of(found[data, n_labels], name)) for n_labels in points]
            panel.plot(points, values, style, label=f"{name} unlabelled images")
        panel.set(title=data, xscale="log", xticks=points, xticklabels=points)
    for panel in axes.flat[len(names) :]:
        panel.axis("off")
    axes.flat[0].legend()
    figure.supxlabel("labels a class and client")
    figure.supylabel("accuracy on own test samples, %")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--stores", type=Path, default=Path("stores"))
    ask.add_argument("--work", type=Path, default=Path("runs/auto-unlabelled"))
    ask.add_argument("--seeds", type=int, default=5)
    ask.add_argument("--labels", default=",".join(map(str, LABELS)))
    ask.add_argument("--sets", default="", help="part of a name; all by default")
    ask.add_argument("--foreign", action="store_true")
    ask.add_argument("--choose", action="store_true")
    ask.add_argument("--plot", type=Path, help="draw what was measured, and measure nothing")
    args = ask.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    recipes = RECIPES if args.choose else {WITH: MixturePrior()}
    first = FIRST if args.choose else 0
    found: dict[tuple[str, int], list[Correct]] = {}
    for name, opened in every(args.stores, args.work):
        if args.sets not in name:
            continue
        data_set: Set | None = None
        for n_labels in map(int, args.labels.split(",")):
            for seed in range(first, first + args.seeds):
                kind = f"{'foreign-' * args.foreign}{'choice-' * args.choose}{n_labels}-{seed}"
                path = args.work / f"{file_name(name)}-{kind}.json"
                if not path.exists() and not args.plot:
                    data_set = data_set or opened()
                    here = untested(data_set, seed) if args.choose else data_set
                    here = with_foreign(here) if args.foreign else here
                    with remembered():
                        run = measure(few_labels(prepared_of(here, {"name": "auto"}, seed), n_labels), recipes)
                    path.write_text(json.dumps(run))
                    print(f"{name}, {n_labels} labels, seed {seed}", flush=True)
                if path.exists():
                    found.setdefault((name, n_labels), []).append(json.loads(path.read_text()))
    if args.plot:
        plot(found, args.plot)
    print("\n".join(lines(found, list(recipes))))


if __name__ == "__main__":
    main()
