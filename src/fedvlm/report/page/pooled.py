"""Test rows of all clients, trainings and seeds of a run taken together: how sure, how useful."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def pooled(details: Mapping[int, Mapping[str, Mapping[str, Any]]], classes: int) -> dict[str, Any]:
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
            out[kind] = _together(scores, classes)
    return out


def _together(scores: Sequence[Mapping[str, Any]], classes: int) -> dict[str, Any]:
    bins: Floats = np.array([one["reliability"] for one in scores])  # (clients, bins, 3)
    rows = bins[:, :, 0].sum(0)
    sure, right = ((bins[:, :, 0] * bins[:, :, i]).sum(0) / rows.clip(1) for i in (1, 2))
    curves: Floats = np.array([one["decision"] for one in scores])
    weight = np.array([one["test_rows"] for one in scores], float)
    benefit = (weight[:, None] * curves[:, :, 1]).sum(0) / weight.sum()
    out: dict[str, Any] = {
        "rows": int(weight.sum()),
        "ECE": round(float((rows * abs(sure - right)).sum() / rows.sum()), 4),
        "reliability": np.stack([sure, right], axis=1)[rows > 0].round(4).tolist(),
        "bins": rows[rows > 0].astype(int).tolist(),
        "risk": _risk(rows, right),
        "decision": _pairs(curves[0, :, 0], benefit),
    }
    if all("scores" in one for one in scores):
        counts: Floats = np.array([one["scores"] for one in scores], float).sum(0)
        out |= ranked(counts)
        out["confusion"] = _confusion(scores, classes)
    return out


def _risk(rows: Floats, right: Floats) -> list[list[float]]:
    """Share of the rows that are answered, and of these the wrong ones, one bin after the other.

    The bins are those of the reliability diagram, the surest first.
    """
    there = rows[::-1] > 0
    answered = rows[::-1][there].cumsum()
    wrong = (rows * (1 - right))[::-1][there].cumsum()
    return _pairs(answered / answered[-1], wrong / answered)


def ranked(counts: Floats) -> dict[str, Any]:
    """ROC and precision-recall of pairs of row and class, from counts of (own, others) by score.

    A step of the ROC curve within a bin is a straight line, as if its scores were ties.
    """
    own, others = (np.concatenate([[0.0], one[::-1].cumsum()]) for one in counts)
    hit, false = own / own[-1], others / max(others[-1], 1.0)
    area = float(((false[1:] - false[:-1]) * (hit[1:] + hit[:-1]) / 2).sum())
    there = own + others > 0
    precision = own[there] / (own + others)[there]
    return {
        "ROC": _pairs(false, hit),
        "AUC": round(area, 4),
        "precision": _pairs(hit[there], precision),
    }


def _pairs(x: Floats, y: Floats) -> list[list[float]]:
    """Points of a line, without those that repeat the one before."""
    out: list[list[float]] = []
    for one in np.stack([x, y], axis=1).round(4).tolist():
        if not out or one != out[-1]:
            out.append(one)
    return out


def _confusion(scores: Sequence[Mapping[str, Any]], classes: int) -> list[list[int]]:
    """[true, predicted, rows] where there are any."""
    total = np.zeros((classes, classes), np.int64)
    for one in scores:
        for true, guess, rows in one["confusion"]:
            total[true, guess] += rows
    return [[int(i), int(j), int(total[i, j])] for i, j in np.argwhere(total)]
