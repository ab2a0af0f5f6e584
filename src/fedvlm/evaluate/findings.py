"""Metrics of several findings per image: AUC, average precision, F1 and calibration of each finding and over all.

`logits` (samples, findings) are log odds, and `y` (samples, findings) is 1, 0 or -1 where a label is unknown. Unknown
labels do not count. A metric is NaN, and left out of means, where no sample or only one kind of samples defines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # tables of finished runs are made without torch
    from torch import Tensor

METRICS = ("AUC", "AP", "micro AUC", "micro AP", "F1", "balanced", "ECE")
DEFAULT_THRESHOLD = 0.5  # of a finding without both kinds of validation samples
CALIBRATION_BINS = 15


def binary_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean over known labels; NaN if there are none."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    known = y >= 0
    return binary_cross_entropy_with_logits(logits[known].double(), y[known].double())


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Return the area under the precision-recall curve in steps; equal scores are one step."""
    if not positive.any():
        return nan
    ordered, order = scores.double().sort(descending=True)
    true_positives = positive[order].double().cumsum(0)
    is_last = ordered != ordered.roll(-1)
    is_last[-1] = True
    places = is_last.nonzero()[:, 0]
    hits = true_positives[places]
    steps = hits.diff(prepend=hits.new_zeros(1))
    return float((steps * hits / (places + 1)).sum() / hits[-1])


def roc_area(scores: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive sample scores above a negative one, ties counting half."""
    import torch

    n_positive = int(positive.sum())
    n_negative = len(positive) - n_positive
    if not n_positive or not n_negative:
        return nan
    ordered = scores.sort().values
    ranks = (torch.searchsorted(ordered, scores) + torch.searchsorted(ordered, scores, right=True) + 1).double() / 2
    return float((ranks[positive].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))


def f1_score(predicted: Tensor, positive: Tensor) -> float:
    either = int(predicted.sum() + positive.sum())
    return 2 * int((predicted & positive).sum()) / either if either else nan


def balanced_accuracy(predicted: Tensor, positive: Tensor) -> float:
    """Return the mean of sensitivity and specificity."""
    if not positive.any() or positive.all():
        return nan
    return (predicted[positive].double().mean().item() + (~predicted[~positive]).double().mean().item()) / 2


def calibration_error(p: Tensor, positive: Tensor) -> float:
    """Return the mean gap between the probability of a finding and its frequency, in bins of equal width."""
    import torch

    if not len(p):
        return nan
    place = ((p * CALIBRATION_BINS).ceil().long() - 1).clamp(0, CALIBRATION_BINS - 1)
    gaps = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add(0, place, p.double() - positive.double())
    return gaps.abs().sum().item() / len(p)


def choose_thresholds(logits: Tensor, y: Tensor) -> list[float]:
    """Return for each finding the probability above which F1 is highest on these (validation) samples."""
    import torch

    out = []
    for finding in range(y.shape[1]):
        known = y[:, finding] >= 0
        scores, positive = logits[known, finding].double(), y[known, finding] == 1
        if not positive.any() or positive.all():
            out.append(DEFAULT_THRESHOLD)
            continue
        ordered, order = scores.sort(descending=True)
        hits = positive[order].double().cumsum(0)
        called = torch.arange(1, len(ordered) + 1, dtype=torch.float64)
        f1 = 2 * hits / (called + positive.sum())
        tied = ordered == ordered.roll(-1)
        tied[-1] = False
        best = int(torch.where(tied, -1.0, f1).argmax())
        below = ordered[best + 1] if best + 1 < len(ordered) else ordered[best] - 1
        out.append(((ordered[best] + below) / 2).sigmoid().item())
    return out


def finding_scores(logits: Tensor, y: Tensor, thresholds: list[float]) -> list[dict[str, float]]:
    """Return the metrics of each finding, with its numbers of known labels and positives; NaN is left out."""
    out = []
    for finding, threshold in enumerate(thresholds):
        known = y[:, finding] >= 0
        p, positive = logits[known, finding].double().sigmoid(), y[known, finding] == 1
        numbers = {
            "AUC": roc_area(p, positive),
            "AP": average_precision(p, positive),
            "F1": f1_score(p >= threshold, positive),
            "balanced": balanced_accuracy(p >= threshold, positive),
            "ECE": calibration_error(p, positive),
        }
        counts = {"known": int(known.sum()), "positive": int(positive.sum()), "threshold": threshold}
        out.append(counts | {key: value for key, value in numbers.items() if isfinite(value)})
    return out


def summarise(logits: Tensor, y: Tensor, by_finding: list[dict[str, float]]) -> dict[str, float]:
    """Return macro means over findings, and micro averages over all known labels."""
    known = y >= 0
    p, positive = logits[known].double().sigmoid(), y[known] == 1
    out = {"micro AUC": roc_area(p, positive), "micro AP": average_precision(p, positive)}
    for name in ("AUC", "AP", "F1", "balanced", "ECE"):
        values = [scores[name] for scores in by_finding if name in scores]
        out[name] = fmean(values) if values else nan
    return {key: value for key, value in out.items() if isfinite(value)}


def correct_labels(logits: Tensor, y: Tensor) -> tuple[int, int, str]:
    """Return how many labels are known, how many are predicted, and a bit per known label in hexadecimal."""
    known = y >= 0
    is_correct = ((logits > 0) == (y == 1))[known]
    return int(known.sum()), int(is_correct.sum()), np.packbits(is_correct.numpy()).tobytes().hex()


def measure_findings(
    logits: Sequence[Tensor], y: Sequence[Tensor], with_metrics: bool, details: bool
) -> dict[str, Any]:
    """Return the scores of validation and test samples as they are recorded: known labels count as samples."""
    (val_logits, test_logits), (val_y, test_y) = logits, y
    val_rows, val_hits, _ = correct_labels(val_logits, val_y)
    rows, hits, bits = correct_labels(test_logits, test_y)
    scores: dict[str, Any] = {"loss": binary_cross_entropy(val_logits, val_y).item()} if val_rows else {}
    scores |= {"validation_rows": val_rows, "validation_hits": val_hits, "test_rows": rows, "test_hits": hits}
    if rows and with_metrics:
        by_finding = finding_scores(test_logits, test_y, choose_thresholds(val_logits, val_y))
        scores |= summarise(test_logits, test_y, by_finding)
        scores |= {"findings": by_finding} | ({"hits": bits} if details else {})
    return scores
