"""Chooses the rates of tables with the demo on validation rows; test rows are never looked at.

python -m tools.demo.tune [unseen|shift|tofa|...]   (a word of GRIDS, without -demo)
prints every candidate and the chosen ones; without a word, those of `fedvlm demo`'s two tables
"""

import sys
from collections.abc import Iterator, Mapping
from itertools import product
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

import fedvlm
from fedvlm.runner.experiment_files import find_experiment, read_toml

SEEDS = [0]  # whose validation rows choose
RATES = (1e-2, 3e-2, 1e-1, 3e-1)
SMALL_RATES = (1e-3, 3e-3, 1e-2)  # of Adam
VARIANTS = (f"promptfl-{kind}" for kind in ("ft", "fedprox", "fedper", "fedamp"))
PROMPTS = ("coop", "promptfl", "promptfolio", "fedotp", *VARIANTS)
# By experiment and method: the values of each setting that is chosen.
GRIDS: dict[str, dict[str, dict[str, tuple[Any, ...]]]] = {
    "demo": {
        "fedavg": {"lr": RATES},
        "fedot": {"lr": RATES},
        "faa-clip": {"lr": SMALL_RATES},
    },
    "demo-shift": {
        "fedavg": {"lr": RATES},
        "fedot": {"lr": RATES},
        "promptfl": {"lr": RATES},
        "fedotp": {"lr": RATES},
    },
    "prompts-demo": {name: {"lr": RATES[1:]} for name in PROMPTS},
    "prompts-more-demo": {"fedot-prompt": {"lr": RATES[:3]}},  # pfedprompt has promptfl's
    "prompts-pathological-demo": {
        "promptfl": {"lr": RATES[:3]},
        "fedot-prompt": {"lr": RATES[:3]},
        "cocoop": {"lr": (2e-3, 1e-2, 3e-2)},
        "dp-fpl": {"lr": RATES[1:3]},
    },
    "faa-clip-demo": {
        "fedot": {"lr": RATES[:3]},
        "faa-clip": {"lr": SMALL_RATES},
        "fedclip": {"lr": SMALL_RATES},
        "fedgh": {"server_lr": RATES[1:3], "lr": RATES[:2]},
        "fedakt": {"lr": RATES[:3]},
    },
    "one-shot-demo": {"promptfl": {"lr": RATES[:3]}},  # fedlpa, fedbens and fens have promptfl's
    "tofa-demo": {name: {"lr": RATES[:3]} for name in ("promptfl", "fedavg", "fedot")},
}
TUNED_BY_METHOD = ("cocoop", "dp-fpl")  # whose entries choose for themselves


def validation(result: fedvlm.Result, seeds: list[int]) -> float:
    """Mean over seeds, trainings and clients that train, of what would be reported."""
    accuracies = []
    for seed in seeds:
        for training in result.trainings(seed).values():
            for id in training["train"]:
                score = training["scores"][id]
                accuracies.append(score["validation_hits"] / score["validation_rows"])
    return fmean(accuracies)


def points(grid: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def tune(name: str, folder: str) -> None:
    values = read_toml(find_experiment(name))
    common = {k: v for k, v in values.items() if k not in ("title", "methods", "baselines", "traffic")}
    grids = dict(GRIDS[name])
    for entry, method in enumerate(values["methods"]):  # of several entries of a method the first chooses for all
        if (grid := grids.get(method["name"])) is None:
            continue
        if method["name"] not in TUNED_BY_METHOD:
            del grids[method["name"]]
        fixed = {k: v for k, v in method.items() if k not in (*grid, "name")}
        label, scores = f"{name} {method['name']} {fixed or ''}".strip(), []
        for number, point in enumerate(points(grid)):
            out = f"{folder}/{name}-{entry}-{number}"
            settings = {k: v for k, v in common.items() if k != "seeds"}
            result = fedvlm.run({**method, **point}, seeds=SEEDS, out=out, **settings)
            scores.append((validation(result, SEEDS), point))
            print(f"{label} {point}: {100 * scores[-1][0]:.2f}", flush=True)
        best = max(scores, key=lambda candidate: candidate[0])
        print(f"{label}: chosen {best[1]} ({100 * best[0]:.2f})", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    usual = {"unseen": "demo", "shift": "demo-shift"}
    with TemporaryDirectory() as place:
        for word in sys.argv[1:] or usual:
            tune(usual.get(word, f"{word}-demo"), place)
