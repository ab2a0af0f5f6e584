"""How far a fit that stopped early is from scikit-learn's solution, by the remaining gradient.

python -m tools.auto.settled --stores FOLDER [--sets demo]
The first client of every set, all ridges, and fewer or more steps. For each decade of the slope:
the largest gap of the objective (in per cent of it) and the least agreement of predictions on
validation rows. `record.SETTLED` is the slope above which a fit is said not to have converged.
"""

import argparse
import math
from pathlib import Path

import torch
from sklearn.linear_model import LogisticRegression

from fedvlm.engines.client import make_client
from fedvlm.maths import logistic_regression
from fedvlm.record import MAX_CONVERGED_GRADIENT
from tools.auto.measure import prepared_of
from tools.auto.sets import Set, every

STEPS = (5, 10, 20, 40, 60)
RIDGES = (1e-2, 1e-4, 1e-6)
Line = tuple[float, float, float]  # slope, gap, agreement


def lines_of(one: Set) -> list[Line]:
    prepared = prepared_of(one, {"name": "alone"}, 0)
    world = prepared.world(prepared.trainings[0])
    mine = make_client(world, sorted(world.members)[0], 0)
    present, y = mine.y.unique(return_inverse=True)
    x, held = mine.x.double(), mine.val_x.double()
    ridges = torch.tensor(RIDGES, dtype=torch.float64)
    nothing = logistic_regression.Head(torch.zeros(len(present), x.shape[1]), torch.zeros(len(present)))
    every_class = torch.ones(len(present), dtype=torch.bool)

    def objective(head: logistic_regression.Head, ridge: float) -> float:
        loss = logistic_regression.summed_cross_entropy(head.logits(x), y) / len(y)
        return float(loss + ridge / 2 * head.weight.square().sum())

    theirs = []
    for ridge in RIDGES:
        # scikit-learn has one row for two classes, which ours differ by: half the ridge
        weak = ridge / 2 if len(present) == 2 else ridge
        fit = LogisticRegression(C=1 / (len(y) * weak), tol=1e-9, max_iter=20_000)
        fit.fit(x.numpy(), y.numpy())
        weight, bias = torch.from_numpy(fit.coef_), torch.from_numpy(fit.intercept_)
        if len(present) == 2:
            weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
        theirs.append(logistic_regression.Head(weight, bias))
    out = []
    for steps in STEPS:
        path = logistic_regression.fit_ridge_path(mine.x, y, ridges, nothing, every_class, steps)
        for number, (ridge, its) in enumerate(zip(RIDGES, theirs, strict=True)):
            ours = logistic_regression.Head(*(part[number] for part in path.heads))
            best = objective(its, ridge)
            gap = 100 * (objective(ours, ridge) / best - 1)
            same = (ours.logits(held).argmax(1) == its.logits(held).argmax(1)).double().mean()
            out.append((float(path.max_gradient[number]), gap, 100 * float(same)))
    return out


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--stores", type=Path, default=Path("stores"))
    ask.add_argument("--work", type=Path, default=Path("runs/auto"))
    ask.add_argument("--sets", default="", help="part of a name; all by default")
    args = ask.parse_args()
    torch.set_num_threads(1)
    found: list[Line] = []
    for name, opened in every(args.stores, args.work):
        if args.sets in name:
            here = lines_of(opened())
            found += here
            below = [one for one in here if one[0] <= MAX_CONVERGED_GRADIENT]
            print(f"{name}: at a slope of at most {MAX_CONVERGED_GRADIENT:g}: {said(below)}", flush=True)
    for decade in range(-10, 1):
        mine = [one for one in found if decade == max(-10, math.ceil(math.log10(one[0])))]
        print(f"slope up to 1e{decade:+03d}: {said(mine)}")


def said(lines: list[Line]) -> str:
    if not lines:
        return "none"
    gap, same = max(one[1] for one in lines), min(one[2] for one in lines)
    return f"{len(lines)} fits, gap at most {gap:.2g} %, predictions agree in {same:.1f} %"


if __name__ == "__main__":
    main()
