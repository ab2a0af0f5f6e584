"""Test rows of all clients, trainings and seeds of a run taken together: how sure, how useful."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def pool_by_group(details: Mapping[int, Mapping[str, Mapping[str, Any]]], classes: int) -> dict[str, Any]:
    """By who was tested, "clients" that trained or "unseen" ones; nothing where nobody was."""
    out = {}
    for kind, key in (("clients", "train"), ("unseen", "unseen")):
        scores = [
            about["scores"][id]
            for trainings in details.values()
            for about in trainings.values()
            for id in about[key]
            if "decision" in about["scores"].get(id, {})
        ]
        if scores:
            out[kind] = _pool_scores(scores, classes)
    return out


def _pool_scores(scores: Sequence[Mapping[str, Any]], classes: int) -> dict[str, Any]:
    bins: Floats = np.array([client_scores["reliability"] for client_scores in scores])  # (clients, bins, 3)
    rows = bins[:, :, 0].sum(0)
    sure, right = ((bins[:, :, 0] * bins[:, :, i]).sum(0) / rows.clip(1) for i in (1, 2))
    curves: Floats = np.array([client_scores["decision"] for client_scores in scores])
    weight = np.array([client_scores["test_rows"] for client_scores in scores], float)
    benefit = (weight[:, None] * curves[:, :, 1]).sum(0) / weight.sum()
    out: dict[str, Any] = {
        "rows": int(weight.sum()),
        "ECE": round(float((rows * abs(sure - right)).sum() / rows.sum()), 4),
        "reliability": np.stack([sure, right], axis=1)[rows > 0].round(4).tolist(),
        "bins": rows[rows > 0].astype(int).tolist(),
        "risk": _risk_coverage(rows, right),
        "decision": _curve_points(curves[0, :, 0], benefit),
    }
    if all("scores" in client_scores for client_scores in scores):
        counts: Floats = np.array([client_scores["scores"] for client_scores in scores], float).sum(0)
        out |= ranking_curves(counts)
        out["confusion"] = _confusion(scores, classes)
    return out


def _risk_coverage(rows: Floats, right: Floats) -> list[list[float]]:
    """Share of the rows that are answered, and of these the wrong ones, one bin after the other.

    The bins are those of the reliability diagram, the surest first.
    """
    nonempty = rows[::-1] > 0
    answered = rows[::-1][nonempty].cumsum()
    wrong = (rows * (1 - right))[::-1][nonempty].cumsum()
    return _curve_points(answered / answered[-1], wrong / answered)


def ranking_curves(counts: Floats) -> dict[str, Any]:
    """ROC and precision-recall of pairs of row and class, from counts of (own, others) by score.

    A step of the ROC curve within a bin is a straight line, as if its scores were ties.
    """
    true_counts, false_counts = (np.concatenate([[0.0], bin_counts[::-1].cumsum()]) for bin_counts in counts)
    hit, false = true_counts / true_counts[-1], false_counts / max(false_counts[-1], 1.0)
    area = float(((false[1:] - false[:-1]) * (hit[1:] + hit[:-1]) / 2).sum())
    nonempty = true_counts + false_counts > 0
    precision = true_counts[nonempty] / (true_counts + false_counts)[nonempty]
    return {
        "ROC": _curve_points(false, hit),
        "AUC": round(area, 4),
        "precision": _curve_points(hit[nonempty], precision),
    }


def _curve_points(x: Floats, y: Floats) -> list[list[float]]:
    """Points of a line, without those that repeat the one before."""
    out: list[list[float]] = []
    for point in np.stack([x, y], axis=1).round(4).tolist():
        if not out or point != out[-1]:
            out.append(point)
    return out


def _confusion(scores: Sequence[Mapping[str, Any]], classes: int) -> list[list[int]]:
    """[true, predicted, rows] where there are any."""
    total = np.zeros((classes, classes), np.int64)
    for client_scores in scores:
        for true, guess, rows in client_scores["confusion"]:
            total[true, guess] += rows
    return [[int(i), int(j), int(total[i, j])] for i, j in np.argwhere(total)]
