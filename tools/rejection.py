"""Measure the rejection of strange images: AUROC against other sets, and false rejections of test samples.

python -m tools.rejection --stores FOLDER [--seeds 20 21 ...]; FOLDER holds pacs_vitb16.npz and chest_vitb16.npz. Every
client's classifier is fitted on its own training samples and calibrated on those it held out; nothing is chosen here.
"""

import argparse
import tempfile
import warnings
from math import lgamma, log
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

import fedvlm
from fedvlm.data.table import EmbeddedTable
from fedvlm.maths.novelty import FALSE_REJECTIONS
from fedvlm.runner.load import load
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build
from tools.auto.sets import silent, write_digits


def binomial_interval(n: int, rate: float, level: float = 0.95) -> tuple[int, int]:
    """Return the counts between which a binomial number lies with at least this probability."""
    k = np.arange(n + 1)
    log_choose = np.array([lgamma(n + 1) - lgamma(place + 1) - lgamma(n - place + 1) for place in k])
    chances = np.exp(log_choose + k * log(rate) + (n - k) * log(1 - rate)).cumsum()
    tail = (1 - level) / 2
    return int(np.searchsorted(chances, tail)), int(np.searchsorted(chances, 1 - tail))


def limit_variance(n_test: int, n_held_out: int, rate: float) -> float:
    """Return the variance of false rejections if the limit itself comes from few samples (beta-binomial)."""
    return n_test * rate * (1 - rate) * (1 + (n_test - 1) / (n_held_out + 2))


def measure(rows: EmbeddedTable, strangers: torch.Tensor, seed: int) -> tuple[list[float], int, int, float, float]:
    """Return the AUROC by client, false rejections, test samples, fraction of strangers rejected, and a variance."""
    clients = {"partition": "domain", "calibration_ratio": 1 / 3}
    settings = {"clients": clients, "protocol": "own-test", "seeds": [seed]}
    areas, rejected, count, found, variance = [], 0, 0, [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        result = fedvlm.run("ridge", embedded=rows, out=f"{folder}/run", **settings)
        partition = prepare(build({"method": "ridge", **settings}), rows, seed).partition
        for id, client in partition.clients.items():
            classifier = result.personalised(id)
            assert classifier.novelty is not None
            test = rows.x[torch.from_numpy(client.test)]
            scores = torch.cat([classifier.novelty.scores(x) for x in (test, strangers)])
            areas.append(float(roc_auc_score(np.arange(len(scores)) >= len(test), scores.numpy())))
            rejected += int(classifier.reject(test).sum())
            count += len(test)
            variance += limit_variance(len(test), len(classifier.novelty.held_out_scores), FALSE_REJECTIONS)
            found.append(float(classifier.reject(strangers).mean()))
    return areas, rejected, count, float(np.mean(found)), variance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(20, 25)))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    demo = load(build({"method": "ridge"}), silent)[0]
    with tempfile.TemporaryDirectory() as folder:
        digits = load(build({"method": "ridge", "data": str(write_digits(Path(folder) / "digits"))}), silent)[0]
    pacs = load(build({"method": "ridge", "encoder": f"store:{options.stores / 'pacs_vitb16.npz'}"}), silent)[0]
    with np.load(options.stores / "chest_vitb16.npz", allow_pickle=False) as arrays:
        chest = torch.from_numpy(arrays["x"]).float()
    sets = [("demo", demo, "digits", digits.x), ("digits", digits, "demo", demo.x), ("PACS", pacs, "chest", chest)]
    print("| set | strangers | AUROC (lowest client) | rejected | false rejections | binomial | with the limit's |")
    print("|---|---|---|---|---|---|---|")
    for name, rows, other, strangers in sets:
        strangers = torch.nn.functional.normalize(strangers.float(), dim=1)
        results = [measure(rows, strangers, seed) for seed in options.seeds]
        areas = [area for result in results for area in result[0]]
        rejected, count = (sum(result[place] for result in results) for place in (1, 2))
        low, high = binomial_interval(count, FALSE_REJECTIONS)
        spread = 1.96 * sum(result[4] for result in results) ** 0.5
        mean = FALSE_REJECTIONS * count
        wide = f"{mean - spread:.0f} to {mean + spread:.0f}"
        found = np.mean([result[3] for result in results])
        print(
            f"| {name} | {other} | {np.mean(areas):.3f} ({min(areas):.3f}) | {found:.1%} | "
            f"{rejected} of {count} ({rejected / count:.1%}) | {low} to {high} | {wide} |"
        )


if __name__ == "__main__":
    main()
