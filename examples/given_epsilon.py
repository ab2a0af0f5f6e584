"""Train three sites with differential privacy: compare the accuracy of several values of epsilon.

Run it: python examples/given_epsilon.py (the tutorial is docs/tutorials/epsilon.md)
"""

import numpy as np
from sklearn.datasets import load_digits

import fedvlm

SITES = ("north", "south", "west")
METHOD = {"name": "tofa", "text": False}  # sums over samples, sent once


def main() -> None:
    digits = load_digits()  # in practice the embeddings of your images
    x, y = digits.data - digits.data.mean(0), digits.target
    site = np.random.default_rng(0).choice(SITES, len(x))
    clients = {name: (x[site == name], y[site == name]) for name in SITES}
    for epsilon in (0, 8, 4, 1):  # 0: no noise
        channel = {"epsilon": epsilon, "delta": 1e-5} if epsilon else {}
        result = fedvlm.run(METHOD, clients=clients, classes=[str(name) for name in range(10)], channel=channel)
        print(f"epsilon {epsilon or 'none':>4}: {result.tables[0]['own']:.1%} on the sites' own test samples")


if __name__ == "__main__":
    main()
