"""Prompts where clients see different classes: FedOTP's plans, its γ, and the number of shots.

python -m tools.prompts.shift [--shots 1,2,4,8,16] [--gammas 0.8,0.5] [--seeds 3] [--work FOLDER]
Prints two tables of own test rows. The rate is chosen for every kind of plan and number of shots
on validation rows of seed 0; unbalanced plans take that of γ = 0.8. Everything trained is kept in
--work, so a second call trains only what is missing. One core.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from fedvlm.runner.load import load
from fedvlm.runner.settings import build
from fedvlm.storage.files import write_file
from tools.auto.sets import silent
from tools.auto.table import interval
from tools.training import groups, share, trained

HELD = 4  # validation rows of a class, however few are trained on: one would choose nothing
RATES = (3e-2, 1e-1)
COMMON = {"ctx_init": "template", "local_epochs": 5, "rounds": 10}
USUAL = 0.8  # γ
Found = dict[int, list[dict[str, Any]]]  # by shots; one training for every seed


def otp(transport: str, **more: float) -> dict[str, Any]:
    return {"name": "fedotp", "transport": transport, **more}


def unbalanced(gamma: float) -> str:
    return f"fedotp, unbalanced, γ = {gamma:g}"


OURS = unbalanced(USUAL)
AGAINST: dict[str, dict[str, Any]] = {
    "promptfl": {"name": "promptfl"},
    "fedotp, averaging": otp("averaging"),
    "fedotp, classical (γ = 1)": otp("classical"),
}


def methods(gammas: list[float]) -> dict[str, dict[str, Any]]:
    """The rows of the table; an unbalanced plan of γ = 1 is the classical one."""
    plans = {unbalanced(g): otp("unbalanced", gamma=g) for g in gammas}
    return {"zero-shot": {"name": "zero-shot"}, **AGAINST, **plans}


class Shift:
    """Trainings of the demo's rows at eight clients of two classes each."""

    def __init__(self, work: Path, seeds: int) -> None:
        self.work, self.seeds = work, range(seeds)
        self.rows = load(build({"method": "fedotp"}), silent)[0]

    def one(self, method: Mapping[str, Any], shots: int, seed: int) -> dict[str, Any]:
        key = "-".join(f"{v:g}" if isinstance(v, float) else str(v) for v in method.values())
        file = self.work / f"{key}-{shots}-{seed}.json"
        if not file.exists():
            dealt = {"partition": "pathological", "count": 8, "shots": shots, "val_shots": HELD}
            write_file(file, json.dumps(trained(self.rows, dealt, method, seed)[0]).encode())
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def every(self, method: Mapping[str, Any], shots: int) -> list[dict[str, Any]]:
        return [self.one(method, shots, seed) for seed in self.seeds]

    def best(self, method: Mapping[str, Any], shots: int) -> float:
        """The rate that validation rows choose."""
        plain = {**method, "gamma": USUAL} if "gamma" in method else method

        def judge(rate: float) -> float:
            return share(self.one({**plain, **COMMON, "lr": rate}, shots, 0)["validation"])

        return max(RATES, key=judge)

    def found(self, method: Mapping[str, Any], shots: int) -> tuple[list[dict[str, Any]], float]:
        if method["name"] == "zero-shot":
            return self.every(method, shots), 0.0
        rate = self.best(method, shots)
        return self.every({**method, **COMMON, "lr": rate}, shots), rate


def spread(trainings: list[dict[str, Any]]) -> str:
    shares = [100 * share(one["test"]) for one in trainings]
    return f"{fmean(shares):.2f} ± {stdev(shares):.2f}"


def apart(ours: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    gap, low, high = interval(groups(ours, "test"), groups(other, "test"))
    return f"{gap:+.2f} [{low:+.2f}, {high:+.2f}]"


def table(first: str, shots: list[int], rows: Mapping[str, list[str]]) -> str:
    head = f"| {first} | " + " | ".join(map(str, shots)) + " |"
    lines = [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    return "\n".join([head, "|---|" + "---:|" * len(shots), *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/prompts-shift"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shots", default="1,2,4,8,16")
    parser.add_argument("--gammas", default="0.9,0.8,0.7,0.6,0.5", help="0.8 is among them")
    told = parser.parse_args()
    torch.set_num_threads(1)
    shift, shots = Shift(told.work, told.seeds), [int(one) for one in told.shots.split(",")]
    every = methods([float(one) for one in told.gammas.split(",")])
    found: dict[str, Found] = {name: {} for name in every}
    rates: dict[str, list[str]] = {name: [] for name in every}
    for few in shots:  # so that an early end leaves whole columns
        for name, method in every.items():
            found[name][few], rate = shift.found(method, few)
            rates[name].append(f"{rate:g}")
    scores = {k: [spread(one) for one in v.values()] for k, v in found.items()}
    less = {k: [apart(found[OURS][few], found[k][few]) for few in shots] for k in AGAINST}
    print(table("own test, %; shots:", shots, scores), end="\n\n")
    print(table(f"{OURS}, less; shots:", shots, less), end="\n\n")
    print(table("rate; shots:", shots, {k: rates[k] for k in (*AGAINST, OURS)}))


if __name__ == "__main__":
    main()
