"""Solve one task twice: with scikit-learn on pooled samples, with fedvlm on three sites that keep theirs.

Run it: python examples/from_scikit_learn.py (the tutorial is docs/tutorials/scikit-learn.md)
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

import fedvlm

SITES = ("north", "south", "west")


def main() -> None:
    digits = load_digits()  # 1,797 vectors of 64 numbers; in practice the embeddings of your images
    sites = np.random.default_rng(0).choice(SITES, len(digits.data))
    x, x_test, y, y_test, site, site_test = train_test_split(digits.data, digits.target, sites, random_state=0)

    pooled = LogisticRegression(max_iter=1000).fit(x, y)  # all samples in one place
    print(f"scikit-learn, pooled samples:     {pooled.score(x_test, y_test):.3f}")

    correct = 0
    for name in SITES:  # each site by itself
        alone = LogisticRegression(max_iter=1000).fit(x[site == name], y[site == name])
        correct += (alone.predict(x_test[site_test == name]) == y_test[site_test == name]).sum()
    print(f"scikit-learn, each site alone:    {correct / len(y_test):.3f}")

    federated = fedvlm.FederatedClassifier("auto").fit(x, y, clients=site)  # sites share sums, not samples
    predicted = federated.predict(x_test, clients=site_test)  # each sample by its own site's classifier
    print(f"fedvlm, three sites:              {(predicted == y_test).mean():.3f}")
    print(f"fedvlm, for a site without data:  {(federated.predict(x_test) == y_test).mean():.3f}")


if __name__ == "__main__":
    main()
