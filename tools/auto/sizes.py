"""Compare auto with its parts at clients of 1, 2, 4, ... samples, without a sample that a reported seed tests.

python -m tools.auto.sizes --stores FOLDER --seeds 2 [--sets demo] [--recipes]
python -m tools.auto.sizes --stores FOLDER --seeds 2 --plot docs/pictures/auto-sizes.svg
The shared head is trained as in tools.auto.choose. Clients of each size are then drawn from samples that did not train
it: of an unseen client, or half of the test samples and the validation samples of one that trained. A quarter of the
drawn samples is for validation. What is left for testing judges.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedvlm.core import Client
from fedvlm.engines.client import World, make_client
from fedvlm.maths.logistic_regression import Head
from tools.auto.choose import FIRST, trained_worlds, untested
from tools.auto.fits import remembered
from tools.auto.measure import file_name, prepared_of
from tools.auto.recipes import RECIPES, SHIPPED, Recipe, n_correct
from tools.auto.sets import every

SIZES = tuple(2**k for k in range(11))  # 1 to 1,024
DRAWS = 24  # clients of a size in one training, at least one of each client
ZERO_SHOT, SHARED = "zero-shot", "shared head"
Accuracies = dict[int, dict[str, float]]  # by size and head, in percent


def pool_and_judges(
    world: World, id: str, is_unseen: bool, draw: np.random.Generator
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return samples to draw small clients from, and samples to test them on."""
    client, test = make_client(world, id, 0), world.members[id].test
    if is_unseen:
        pool = torch.cat([client.x, client.val_x]), torch.cat([client.y, client.val_y])
        return pool, (world.x[torch.from_numpy(test)], world.y[torch.from_numpy(test)])
    drawn = torch.from_numpy(draw.permutation(test))
    half, rest = drawn[: len(test) // 2], drawn[len(test) // 2 :]
    pool = torch.cat([client.val_x, world.x[half]]), torch.cat([client.val_y, world.y[half]])
    return pool, (world.x[rest], world.y[rest])


def small_clients(
    client: Client, pool: tuple[Tensor, Tensor], n_draws: int, draw: np.random.Generator
) -> Iterator[tuple[int, Client]]:
    """Draw clients of every size that the pool has samples for."""
    x, y = pool
    for size in (size for size in SIZES if size <= len(y)):
        for _ in range(n_draws if size <= len(y) // 2 else 1):
            val, train = np.split(draw.permutation(len(y))[:size], [size // 4])
            yield size, replace(client, x=x[train], y=y[train], val_x=x[val], val_y=y[val])


def accuracies(
    world: World, ids: tuple[str, ...], is_unseen: bool, shared: Head, seed: int, recipes: Sequence[Recipe]
) -> Accuracies:
    """Return the mean accuracy of every recipe over clients of a size."""
    draw = np.random.default_rng(seed)
    found: dict[int, dict[str, list[float]]] = {}
    text = world.frozen.text
    for id in ids:
        pool, (test_x, test_y) = pool_and_judges(world, id, is_unseen, draw)
        heads = {SHARED: shared} | ({} if text is None else {ZERO_SHOT: Head(text, torch.zeros(len(text)))})
        for size, client in small_clients(make_client(world, id, 0), pool, -(-DRAWS // len(ids)), draw):
            own = {recipe.name: recipe.head(shared, client, world.frozen) for recipe in recipes}
            for name, head in (heads | own).items():
                head = Head(*(part.double() for part in head))
                accuracy = 100 * n_correct(head, test_x, test_y) / max(len(test_y), 1)
                found.setdefault(size, {}).setdefault(name, []).append(accuracy)
    return {size: {name: float(np.mean(values)) for name, values in heads.items()} for size, heads in found.items()}


def lines(found: dict[str, list[Accuracies]], name: str) -> Iterator[str]:
    """Return a Markdown table of one recipe less the shared head (less zero-shot), by set and size."""
    yield f"{name}: less the shared head (less zero-shot), by samples of a client"
    yield "| data | " + " | ".join(map(str, SIZES)) + " |"
    yield "|---" * (len(SIZES) + 1) + "|"
    for data, trainings in found.items():
        cells = []
        for size in SIZES:
            values = [heads[size] for heads in trainings if size in heads]
            means = [difference(values, name, other) for other in (SHARED, ZERO_SHOT)]
            texts = [
                form.format(mean)
                for form, mean in zip(("{:+.1f}", "({:+.1f})"), means, strict=True)
                if mean is not None
            ]
            cells.append(" ".join(texts) or "-")
        yield f"| {data} | " + " | ".join(cells) + " |"


def plot(found: dict[str, list[Accuracies]], path: Path) -> None:
    """Draw what ships less the shared head and less zero-shot over the samples of a client, one panel a set."""
    from matplotlib import pyplot

    columns = 4
    figure, axes = pyplot.subplots(-(-len(found) // columns), columns, figsize=(12, 9), squeeze=False)
    for panel, (data, trainings) in zip(axes.flat, found.items(), strict=False):
        for other, style in ((SHARED, "o-"), (ZERO_SHOT, "o--")):
            by_size = {
                size: difference([heads[size] for heads in trainings if size in heads], SHIPPED.name, other)
                for size in SIZES
            }
            points = {size: gap for size, gap in by_size.items() if gap is not None}
            panel.plot(list(points), list(points.values()), style, label=f"less {other}")
        panel.axhline(-0.3, color="grey", linewidth=0.5)
        panel.set(title=data, xscale="log")
    for panel in axes.flat[len(found) :]:
        panel.axis("off")
    axes.flat[0].legend()
    figure.supxlabel("samples of a client")
    figure.supylabel("accuracy of auto, difference in points")
    figure.tight_layout()
    figure.savefig(path)


def difference(values: list[dict[str, float]], name: str, other: str) -> float | None:
    """Return the mean difference of two heads; None where one is missing."""
    gaps = [heads[name] - heads[other] for heads in values if other in heads]
    return float(np.mean(gaps)) if gaps else None


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--stores", type=Path, default=Path("stores"))
    ask.add_argument("--work", type=Path, default=Path("runs/auto-sizes"))
    ask.add_argument("--seeds", type=int, default=2)
    ask.add_argument("--sets", default="", help="part of a name; all by default")
    ask.add_argument("--plot", type=Path, help="draw what was measured, and measure nothing")
    ask.add_argument("--recipes", action="store_true", help="a table for every recipe, not only what ships")
    args = ask.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    recipes = [recipe for recipe in RECIPES if recipe.prior is not None] if args.recipes else [SHIPPED]
    found: dict[str, list[Accuracies]] = {}
    for name, opened in every(args.stores, args.work):
        if args.sets not in name:
            continue
        for seed in range(FIRST, FIRST + args.seeds):
            path = args.work / f"{file_name(name)}-{len(recipes)}-{seed}.json"
            if not path.exists() and args.plot:
                continue
            if not path.exists():
                prepared, here = prepared_of(untested(opened(), seed), {"name": "auto"}, seed), []
                for world, training, shared in trained_worlds(prepared):
                    is_unseen = bool(training.unseen) and prepared.generalises
                    with remembered():
                        ids = training.unseen if is_unseen else training.train
                        here.append(accuracies(world, tuple(ids), is_unseen, shared, seed, recipes))
                path.write_text(json.dumps(here))
                print(f"{name}, seed {seed}", flush=True)
            stored = json.loads(path.read_text())
            found.setdefault(name, []).extend({int(size): heads for size, heads in one.items()} for one in stored)
    if args.plot:
        plot(found, args.plot)
    for recipe in recipes:
        print("\n".join(lines(found, recipe.name)))


if __name__ == "__main__":
    main()
