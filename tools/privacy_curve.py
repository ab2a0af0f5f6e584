"""Measure accuracy over ε on PACS for noise at each site and inside the verified sum, and draw it.

python -m tools.privacy_curve --store pacs_vitb16.npz --rows FILE [--seeds 5] [--samples 0,100] [--output SVG]
Seven classes without text, four sites (the domains), own-test protocol, δ = 1e-5. Accuracy is the mean over sites of
each site's test accuracy. `--samples 100` draws so many training samples at each site; 0 takes all.
Rows that the file has are not run again.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from fedvlm import seeds
from fedvlm.engines.loop import finish_training, initial_state, open_engine, run_rounds
from fedvlm.engines.state import Plan
from fedvlm.evaluate.metrics import mean_accuracy
from fedvlm.runner.load import load
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build

EPSILONS = (0.0, 8.0, 4.0, 2.0, 1.0, 0.5)  # 0: no noise
MODES = {"site": {}, "sum": {"verified": True, "honest": 4}}
METHODS = {"tofa": {"text": False}, "ridge": {}, "auto": {}}
NOISY = ("tofa",)
FIRST_SEED = 0


def accuracy(store: Path, method: str, channel: dict[str, object], n_samples: int, seed: int) -> float:
    """Run one training and return the mean test accuracy over sites."""
    table = {"protocol": "own-test", "encoder": f"store:{store}", "clients": {"partition": "domain"}}
    settings = build({**table, "method": {"name": method, **METHODS[method]}, "channel": channel})
    rows, _ = load(settings, lambda *progress: None)
    prepared = prepare(settings, replace(rows, text=None), seed)
    (training,) = prepared.trainings
    world = prepared.world(training)
    if n_samples:
        drawn = {
            id: seeds.numbers("privacy curve", seed, id).permutation(member.train)[:n_samples]
            for id, member in world.members.items()
        }
        members = {id: replace(member, train=np.sort(drawn[id])) for id, member in world.members.items()}
        world = replace(world, members=members)
    plan, (state, local) = Plan(training.train, ()), initial_state(world)
    engine = open_engine("sequential", world, 1, settings.method.rounds)
    state = run_rounds(world, engine, plan, state, local, lambda state, line: None)
    outcome = finish_training(world, engine, plan, state, local)
    return 100 * (mean_accuracy(outcome.scores, training.train, "test") or 0.0)


def draw(rows: list[dict[str, float | str]], path: Path) -> None:
    """Draw accuracy over ε, one panel for each number of samples."""
    import matplotlib.pyplot as plt

    sizes = sorted({row["samples"] for row in rows})
    figure, axes = plt.subplots(1, len(sizes), figsize=(4.5 * len(sizes), 3.2), squeeze=False)
    for axis, size in zip(axes[0], sizes, strict=True):
        for method in NOISY:
            for mode, style in (("site", "--"), ("sum", "-")):
                found = [r for r in rows if (r["method"], r["mode"], r["samples"]) == (method, mode, size)]
                points = [r for r in found if r["epsilon"]]
                if points:
                    x, y, e = ([r[key] for r in points] for key in ("epsilon", "mean", "std"))
                    label = f"{method}, noise {'inside the sum' if mode == 'sum' else 'at each site'}"
                    axis.errorbar(x, y, e, linestyle=style, marker="o", markersize=3, capsize=2, label=label)
        best = max(r["mean"] for r in rows if not r["epsilon"] and r["samples"] == size)
        axis.axhline(best, color="grey", linewidth=0.8, label="best without noise")
        axis.set(xscale="log", xlabel="ε (δ = 1e-5)", ylabel="accuracy (%)")
        axis.set_title(f"{size} samples a site" if size else "all samples of a site")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", default="0,100")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--epsilons", default=",".join(map(str, EPSILONS)))
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    epsilons = [float(epsilon) for epsilon in options.epsilons.split(",")]
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    done = {tuple(row[key] for key in ("method", "mode", "samples", "epsilon")) for row in rows}
    for n_samples in map(int, options.samples.split(",")):
        for method in options.methods.split(","):
            for epsilon in [epsilon for epsilon in epsilons if method in NOISY or not epsilon]:
                for mode, channel in MODES.items() if epsilon else (("site", {}),):
                    if (method, mode, n_samples, epsilon) in done:
                        continue
                    values = [
                        accuracy(options.store, method, {**channel, "epsilon": epsilon}, n_samples, FIRST_SEED + seed)
                        for seed in range(options.seeds)
                    ]
                    spread = stdev(values) if len(values) > 1 else 0.0
                    row = {"method": method, "mode": mode, "samples": n_samples, "epsilon": epsilon}
                    rows.append({**row, "mean": mean(values), "std": spread})
                    with options.rows.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    if options.output:
        draw(rows, options.output)


if __name__ == "__main__":
    main()
