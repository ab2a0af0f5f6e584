"""Bound ε of the noise on class statistics from below: tell the uploads of two neighbouring data sets apart.

python -m tools.canary [--draws 20000]
The data sets differ in one sample, which is replaced by one of another class at a right angle: the worst pair. A test
looks at the projection of an upload on their difference. Its threshold is chosen on one half of the draws; on the other
half, Clopper-Pearson bounds (95 %) of its two error rates give ln((true positives - δ) / false positives) <= ε.
"""

import argparse
import math

import numpy as np
import torch
from scipy.stats import beta

from fedvlm.maths.gaussian_classes import count_noise_values, released_class_sums
from fedvlm.maths.privacy import epsilon, secure_normal

CLASSES, DIM, DELTA, ERROR = 2, 8, 1e-5, 0.05


def upload(x: torch.Tensor, y: torch.Tensor, multiplier: float, noise: torch.Tensor) -> torch.Tensor:
    allowed = torch.ones(CLASSES, dtype=torch.bool)
    return torch.cat([part.double().flatten() for part in released_class_sums(x, y, allowed, 1, multiplier, noise)])


def lower_bound(positive: np.ndarray, negative: np.ndarray) -> float:
    """Return a bound that holds with 95 %, for the best threshold of the first half."""
    half = len(positive) // 2
    thresholds = np.quantile(np.concatenate([positive[:half], negative[:half]]), np.linspace(0.005, 0.995, 199))

    def bound(ones: np.ndarray, zeros: np.ndarray, threshold: float) -> float:
        n, hits, false_hits = len(ones), int((ones > threshold).sum()), int((zeros > threshold).sum())
        low = float(beta.ppf(ERROR / 2, hits, n - hits + 1)) if hits else 0.0
        high = float(beta.ppf(1 - ERROR / 2, false_hits + 1, n - false_hits)) if false_hits < n else 1.0
        return math.log((low - DELTA) / high) if low > DELTA else 0.0

    best = max(thresholds, key=lambda threshold: bound(positive[:half], negative[:half], threshold))
    return max(0.0, bound(positive[half:], negative[half:], best))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20_000)
    options = parser.parse_args()
    background = torch.nn.functional.normalize(torch.randn(40, DIM, generator=torch.Generator().manual_seed(1)), dim=1)
    labels = torch.arange(40) % CLASSES
    pairs = [(torch.cat([background, torch.eye(DIM)[k][None]]), torch.cat([labels, torch.tensor([k])])) for k in (0, 1)]
    size = count_noise_values(CLASSES, DIM)
    direction = upload(*pairs[0], 1e-9, torch.zeros(size)) - upload(*pairs[1], 1e-9, torch.zeros(size))
    print("| z | ε counted | ε at least, by a canary |\n|---|---|---|")
    for multiplier in (0.5, 1.0, 2.0, 4.0):
        draws = [
            np.array([float(upload(*pair, multiplier, secure_normal(size)) @ direction) for _ in range(options.draws)])
            for pair in pairs
        ]
        counted = epsilon(multiplier, 1, delta=DELTA)
        print(f"| {multiplier:g} | {counted:.2f} | {lower_bound(*draws):.2f} |", flush=True)


if __name__ == "__main__":
    main()
