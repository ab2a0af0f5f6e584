"""Metrics of a classifier (accuracy, calibration, utility), and their means over clients and seeds.

A metric takes `p` (samples, classes), probabilities, and `y` (samples,), the true classes. It is NaN where the samples
do not define it: the AUC of samples of a single class, anything of no samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.errors import SettingsError
from fedvlm.plugins import add_entry, load_outside

if TYPE_CHECKING:  # tables of finished runs are made without torch
    from torch import Tensor

__all__ = ["METRICS", "Metric", "compute_metrics", "metrics", "register"]
Results = Mapping[str, Mapping[str, Any]]  # scores by client
Table = dict[str, float | None]  # column -> value, None where it is not defined
Metric = Callable[["Tensor", "Tensor"], float]
CALIBRATION_BINS = 15  # of the reliability diagram
MIN_OUTLIER_FRACTION = 0.7  # of a client's rounds, above which it is reported as an outlier
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(1, 20))  # of the decision curve
MAX_TABLE_THRESHOLD = 0.5  # tables have the mean net benefit over thresholds up to this one
SCORE_EDGES = tuple(1 / (1 + exp(-step / 4)) for step in range(-32, 33))  # of the histograms of scores
RESERVED_NAMES = {f"{part}_{quantity}" for part in ("validation", "test") for quantity in ("rows", "hits")} | {
    *("loss", "reliability", "decision", "hits", "own_class_hits", "confusion", "recall", "scores")
}
# Columns of tables that are no metrics.
RESERVED_NAMES |= {"condition_number", "condition_number-per-target", "kappa", "cosine", "dof", "trained", "A[j][i]"}
RESERVED_NAMES |= {"P-per-target", "C-per-target", "worst", "spread", "average", "rows", "ROC", "PR"}
RESERVED_NAMES |= {"seconds", "minutes", "findings", "AP", "micro AUC", "micro AP"}


def mean_net_benefit(p: Tensor, y: Tensor) -> float:
    """Net benefit of decisions by the classifier, averaged over the usual thresholds."""
    curve: list[float] = net_benefit(p, y).tolist()
    usual = [value for at, value in zip(THRESHOLDS, curve, strict=True) if at <= MAX_TABLE_THRESHOLD]
    return sum(usual) / len(usual)


def compute_metrics(p: Tensor, y: Tensor) -> dict[str, float]:
    """Compute all metrics; leave out those that the samples do not define."""
    out: dict[str, float] = {}
    for name, metric in metrics().items():
        try:
            number = float(metric(p, y))
        except Exception as error:
            if name in METRICS:
                raise
            reason = f"{type(error).__name__}: {error}"
            raise SettingsError(f"the metric {name!r} of an outside package fails ({reason}); uninstall it") from error
        if isfinite(number):
            out[name] = number
    return out


def diagram_data(p: Tensor, y: Tensor) -> dict[str, list[list[float]]]:
    """Compute the points of the reliability diagram and of the decision curve."""
    import torch

    diagram = reliability(p, y)
    bins = torch.stack([diagram.rows, diagram.confidence, diagram.accuracy], dim=1)
    curve = torch.stack([torch.tensor(THRESHOLDS, dtype=torch.float64), net_benefit(p, y)], dim=1)
    return {"reliability": bins.tolist(), "decision": curve.tolist()}


def prediction_details(p: Tensor, y: Tensor) -> dict[str, Any]:
    """Return correct predictions, confusion matrix, recall per class and histograms of scores.

    `hits` has a bit per sample, in hexadecimal: 1 if correct; `confusion` has [true, predicted, count] for nonzero
    counts; `recall` is None for a class without samples; `scores` are histograms of the probabilities of the true
    class and of the other classes, for ROC and precision-recall curves.
    """
    import torch

    confusion = _confusion(p, y)
    cells = [[*place, int(confusion[tuple(place)])] for place in confusion.nonzero().tolist()]
    rows = confusion.sum(1)
    recalls = (confusion.diagonal() / rows.clamp(min=1)).tolist()
    is_true_class = torch.nn.functional.one_hot(y, p.shape[1]).bool()
    place = torch.bucketize(p.double(), torch.tensor(SCORE_EDGES, dtype=torch.float64))
    counts, parts = len(SCORE_EDGES) + 1, (is_true_class, ~is_true_class)
    histograms = [torch.bincount(place[part], minlength=counts) for part in parts]
    return {
        "hits": np.packbits((p.argmax(1) == y).numpy()).tobytes().hex(),
        "confusion": cells,
        "recall": [entry if n else None for entry, n in zip(recalls, rows.tolist(), strict=True)],
        "scores": [entry.tolist() for entry in histograms],
    }


def unpack_correct(packed: str, rows: int) -> NDArray[np.bool_]:
    """(samples,) unpack the `hits` of `prediction_details`."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8), count=rows).astype(bool)


def curve_points(counts: Sequence[Sequence[int]], kind: str) -> list[list[float]]:
    """Return the one-vs-rest ROC or PR curve of the `scores` of `prediction_details`, micro-averaged over classes.

    "ROC" has [false, true] positive rates, "PR" has [recall, precision], from the highest threshold to the lowest;
    empty without both positives and negatives. Made from histograms, because a record does not hold single scores.
    """
    positives, negatives = (np.cumsum(np.array(histogram, np.float64)[::-1]) for histogram in counts)
    if not positives[-1] or not negatives[-1]:
        return []
    if kind == "ROC":
        pairs = np.stack([negatives / negatives[-1], positives / positives[-1]], 1)
        return [[0.0, 0.0], *pairs.tolist()]
    called = positives + negatives > 0
    pairs = np.stack([positives / positives[-1], positives / (positives + negatives).clip(1)], 1)[called]
    return [[0.0, float(pairs[0, 1])], *pairs.tolist()]


def area_under_curve(curve: Sequence[Sequence[float]], kind: str) -> float:
    """Return the area under a curve of `curve_points`; for PR in steps, which is the average precision."""
    x, y = np.array(curve).T
    heights = (y[1:] + y[:-1]) / 2 if kind == "ROC" else y[1:]
    return float((np.diff(x) * heights).sum())


def accuracy(p: Tensor, y: Tensor) -> float:
    """Fraction of samples classified correctly."""
    return (p.argmax(1) == y).double().mean().item()


def _confusion(p: Tensor, y: Tensor) -> Tensor:
    """(classes, classes): count samples by true and by predicted class."""
    import torch

    classes = p.shape[1]
    pairs = torch.bincount(y * classes + p.argmax(1), minlength=classes**2)
    return pairs.reshape(classes, classes).double()


def balanced_accuracy(p: Tensor, y: Tensor) -> float:
    """Mean recall over the classes that have samples."""
    confusion = _confusion(p, y)
    has_samples = confusion.sum(1) > 0
    return (confusion.diagonal()[has_samples] / confusion.sum(1)[has_samples]).mean().item()


def macro_f1(p: Tensor, y: Tensor) -> float:
    """Mean F1 over the classes that have samples or are predicted."""
    confusion = _confusion(p, y)
    either = confusion.sum(0) + confusion.sum(1)
    return (2 * confusion.diagonal() / either)[either > 0].mean().item()


def auc(p: Tensor, y: Tensor) -> float:
    """One-vs-rest area under the ROC curve, ties counting half.

    The mean over the classes that have both positive and negative samples.
    """
    import torch

    rows, classes = p.shape
    is_true_class = torch.nn.functional.one_hot(y, classes).double()
    n_positive = is_true_class.sum(0)
    has_curve = (n_positive > 0) & (n_positive < rows)
    if not has_curve.any():
        return float("nan")
    scores = p.mT[has_curve].contiguous()
    ordered = scores.sort(dim=1).values
    # The mean rank of equal scores, counted from 1.
    first = torch.searchsorted(ordered, scores)
    last = torch.searchsorted(ordered, scores, right=True)
    ranks = (first + last + 1).double() / 2
    above = (ranks * is_true_class.mT[has_curve]).sum(1) - n_positive[has_curve] * (n_positive[has_curve] + 1) / 2
    return (above / (n_positive * (rows - n_positive))[has_curve]).mean().item()


@dataclass(frozen=True)
class Reliability:
    """Samples by confidence, their largest probability, in bins of equal width."""

    rows: Tensor  # (bins,)
    confidence: Tensor  # (bins,) mean confidence, 0 where a bin is empty
    accuracy: Tensor  # (bins,)

    @property
    def error(self) -> float:
        """ECE: the mean gap between confidence and accuracy, weighted by the samples of each bin."""
        gaps = (self.confidence - self.accuracy).abs()
        return ((self.rows * gaps).sum() / self.rows.sum()).item()


def calibration_error(p: Tensor, y: Tensor) -> float:
    """Expected calibration error: the mean gap between confidence and accuracy."""
    return reliability(p, y).error


def reliability(p: Tensor, y: Tensor) -> Reliability:
    """Compute the reliability diagram; a bin includes its upper edge: (0, 1/15], (1/15, 2/15], ..."""
    import torch

    bins, (confidence, guess) = CALIBRATION_BINS, p.double().max(1)
    place = ((confidence * bins).ceil().long() - 1).clamp(0, bins - 1)

    def total(values: Tensor) -> Tensor:
        return torch.zeros(bins, dtype=torch.float64).index_add(0, place, values.double())

    rows = total(torch.ones_like(confidence))
    filled = rows.clamp(min=1)
    return Reliability(rows, total(confidence) / filled, total(guess == y) / filled)


def net_benefit(p: Tensor, y: Tensor, thresholds: tuple[float, ...] = THRESHOLDS) -> Tensor:
    """(thresholds,): the decision curve, the mean over classes of one-vs-rest net benefits.

    At threshold t a sample is positive for a class if its probability is at least t; the net benefit is the fraction
    of true positives minus that of false positives times t / (1 - t). Classes without samples count too: predicting
    them is harmful.
    """
    import torch

    edges = torch.tensor(thresholds, dtype=p.dtype)
    place = torch.bucketize(p, edges, right=True)  # as many thresholds are no higher
    bins = len(thresholds) + 1
    true_counts = torch.bincount(place.gather(1, y[:, None])[:, 0], minlength=bins)
    all_counts = torch.bincount(place.flatten(), minlength=bins)
    right, called = (counts.flip(0).cumsum(0).flip(0)[1:].double() for counts in (true_counts, all_counts))
    exact = torch.tensor(thresholds, dtype=torch.float64)
    return (right - (called - right) * exact / (1 - exact)) / max(p.numel(), 1)


ALL: dict[str, Metric] = {"accuracy": accuracy, "balanced": balanced_accuracy, "F1": macro_f1, "AUC": auc}
ALL |= {"ECE": calibration_error, "net benefit": mean_net_benefit}
METRICS = tuple(ALL)  # the columns of tables, and all that a site may report about its samples


def register(name: str, metric: Metric) -> Metric:
    """Add a metric under the name of its column in tables; its docstring describes it."""
    if name in RESERVED_NAMES:
        raise SettingsError(f"metric {name!r}: the name is taken by a column of tables; rename it")
    if not getattr(metric, "__doc__", None):
        raise SettingsError(f"metric {name!r}: it has no docstring; describe it in one line")
    add_entry(ALL, "metric", name, metric)
    return metric


def metrics() -> dict[str, Metric]:
    """Return all metrics: our own and those of outside packages (entry-point group fedvlm.metrics)."""
    load_outside("fedvlm.metrics")
    return dict(ALL)


def mean_metric(scores: Results, ids: Iterable[str], name: str) -> float | None:
    """Average a metric over clients; None where no client has it."""
    if name == "accuracy":
        return mean_accuracy(scores, ids)
    parts = [scores[id][name] for id in sorted(ids) if name in scores.get(id, {})]
    return fmean(parts) if parts else None


def mean_accuracy(scores: Results, ids: Iterable[str], split: str = "test") -> float | None:
    """Average the accuracy over clients; None where no client has samples."""
    hits, rows = f"{split}_hits", f"{split}_rows"
    parts = [scores[id][hits] / scores[id][rows] for id in sorted(ids) if id in scores and scores[id][rows]]
    return fmean(parts) if parts else None


def mean_and_std(tables: Sequence[Table]) -> dict[str, tuple[float | None, float | None]]:
    """Return mean and sample standard deviation over seeds of each column; no deviation for one seed."""
    out: dict[str, tuple[float | None, float | None]] = {}
    for key in tables[0]:
        values = [value for table in tables if (value := table.get(key)) is not None]
        mean = fmean(values) if values else None
        out[key] = (mean, stdev(values) if len(values) > 1 else None)
    return out


def describe_outliers(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describe clients whose uploads were outliers in most of their rounds of a training."""
    rounds_of_client: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        for id, entry in line["clients"].items():
            if "far" in entry:
                rounds_of_client.setdefault((str(line.get("training", "")), id), []).append(entry)
    out = []
    for (training, id), entries in sorted(rounds_of_client.items()):
        outlying = [entry for entry in entries if entry["far"]]
        if len(outlying) > MIN_OUTLIER_FRACTION * len(entries):
            norm, cosine = (sum(entry[key] for entry in outlying) / len(outlying) for key in ("norm", "cosine"))
            out.append(
                f"client {id} was far from the rest in {len(outlying)} of {len(entries)} rounds of "
                f"{training}: its changes were {norm:.2g} times as long as the median, at a "
                f"cosine of {cosine:.2f} to the others"
            )
    return out
