"""Compares FAA-CLIP's two ways of passing source and target, at three rates, without a test sample.

python -m tools.faa_passes [--stores FOLDER] [--seeds 5] [--rounds 10]
Every unseen domain in turn; of the others one is left out of the training, and its validation samples judge. Sets are
the demo and, where its embeddings are in FOLDER, PACS without guitars. Seeds are from 100 on, which no table reports.
"""

import argparse
from pathlib import Path
from statistics import fmean, stdev

from fedvlm.core import make
from fedvlm.data.table import EmbeddedTable
from fedvlm.runner.load import Loader
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build
from fedvlm.runner.tune import Trial, advance_trial
from tools.auto.sets import every

RATES = (5e-5, 5e-4, 5e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shots", type=int, default=32, help="training samples of a class and client; 0: all")
    args = parser.parse_args()
    values = {
        "data": "demo",
        "encoder": "demo",
        "protocol": "leave-one-domain-out",
        "method": "zero-shot",
        "workers": 1,
    }
    sets: dict[str, EmbeddedTable] = {"demo": Loader()(build(values), lambda *_: None)[0]}
    if args.stores:
        sets["PACS"] = dict(every(args.stores, args.stores))["pacs, six classes"]().rows
    methods = {"zero-shot": make("zero-shot")}
    for lr in RATES:
        for passes in ("joint", "apart"):
            methods[f"{passes}, lr {lr:g}"] = make("faa-clip", passes=passes, lr=lr, rounds=args.rounds)
    for name, samples in sets.items():
        settings = build({**values, "clients": {"partition": "domain", "shots": args.shots}})
        scores: dict[str, list[float]] = {label: [] for label in methods}
        for seed in range(100, 100 + args.seeds):
            prepared = prepare(settings, samples, seed)
            for label, method in methods.items():
                trial = Trial(method, {})
                advance_trial(prepared, trial, method.rounds)
                scores[label].append(100 * trial.score)
                print(f"{name}, seed {seed}, {label}: {scores[label][-1]:.2f} of {trial.samples}", flush=True)
        for label, found in scores.items():
            print(f"{name}, {label}: {fmean(found):.2f} ± {stdev(found) if len(found) > 1 else 0:.2f}", flush=True)


if __name__ == "__main__":
    main()
