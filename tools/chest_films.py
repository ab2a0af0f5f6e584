"""Compare methods with scikit-learn on chest films of six sites, by patient split and by sex.

python -m tools.chest_films STORE [--seeds 3] [--methods alone,ridge,auto,pooled]
STORE is a table of embeddings with findings, sites (clients), patients (groups) and a column sex. scikit-learn fits one
logistic regression for each finding, per site and pooled, with C chosen by the likelihood of validation samples. The
table has the AUC, mean over findings, of the test samples of all sites together.
"""

import argparse
import warnings
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

import numpy as np
from sklearn.linear_model import LogisticRegression

import fedvlm
from fedvlm.data.table import EmbeddedTable
from fedvlm.encoders.store import open_store
from fedvlm.report.subgroups import compute_value
from fedvlm.report.tables import render_table
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build

SETTINGS = {"protocol": "own-test", "clients": {"partition": "own"}, "subgroups": ["sex"], "allow_small": True}
STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)  # C of scikit-learn
SEXES = ("F", "M")


def fit_finding(x: np.ndarray, y: np.ndarray, val_x: np.ndarray, val_y: np.ndarray, test_x: np.ndarray) -> np.ndarray:
    """Return the probability of a finding in test samples; its frequency where training samples are all alike."""
    if len(set(y.tolist())) < 2:
        return np.full(len(test_x), y.mean() if len(y) else 0.5)
    best, best_loss = None, np.inf
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=2000).fit(x, y)
        p = model.predict_proba(val_x)[:, 1].clip(1e-6, 1 - 1e-6)
        loss = -np.mean(np.where(val_y == 1, np.log(p), np.log(1 - p)))
        if best is None or loss < best_loss:
            best, best_loss = model, loss
    assert best is not None
    return best.predict_proba(test_x)[:, 1]


def predict_with_sklearn(table: EmbeddedTable, seed: int, pooled: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return probabilities, labels and sex of the test samples of all sites."""
    assert table.findings is not None
    x, y = table.x.numpy().astype(np.float64), table.findings[table.labels]
    clients = prepare(build({"method": "alone", **SETTINGS}), table, seed).partition.clients
    parts = []
    for client in clients.values():
        members = list(clients.values()) if pooled else [client]
        train, val = (np.concatenate([getattr(m, part) for m in members]) for part in ("train", "validation"))
        columns = [
            fit_finding(x[train], y[train, k], x[val], y[val, k], x[client.test]) for k in range(len(table.classes))
        ]
        parts.append((np.stack(columns, 1), y[client.test], table.subgroups["sex"][client.test]))
    p, labels, sex = (np.concatenate(column) for column in zip(*parts, strict=True))
    return p, labels, sex


def predict_with_fedvlm(table: EmbeddedTable, seed: int, method: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with TemporaryDirectory() as folder:
        result = fedvlm.run(method, embedded=table, out=Path(folder) / "run", seeds=[seed], **SETTINGS)
        samples = [
            score["samples"]
            for training in result.trainings(seed).values()
            for score in training["scores"].values()
            if score.get("samples") and score["samples"]["y"]
        ]
    p, y = (np.concatenate([np.array(part[key]) for part in samples]) for key in ("p", "y"))
    return p, y, np.concatenate([np.array(part["subgroups"]["sex"]) for part in samples])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default="alone,ridge,auto,pooled")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table = open_store(options.store)
    body = []
    for name in ("scikit-learn, per site", "scikit-learn, pooled", *options.methods.split(",")):
        values: list[list[float]] = []
        for seed in range(options.seeds):
            if name.startswith("scikit-learn"):
                p, y, sex = predict_with_sklearn(table, seed, name.endswith("pooled"))
            else:
                p, y, sex = predict_with_fedvlm(table, seed, name)
            parts = [np.ones(len(sex), bool), *(sex == value for value in SEXES)]
            values.append([compute_value(p[part], y[part], "AUC") for part in parts])
        columns = [[100 * value for value in column] for column in zip(*values, strict=True)]
        body.append([name, *(f"{fmean(c):.1f} ± {stdev(c) if len(c) > 1 else 0:.1f}" for c in columns)])
        print(body[-1], flush=True)
    print(render_table(["method", "all", *SEXES], body, "markdown"))


if __name__ == "__main__":
    main()
