"""What a classifier's rows set aside are good for: a temperature, and sets of promised coverage.

Split conformal prediction: with n rows that nothing has seen, a set of all classes whose score is
at most the ⌈(n + 1)(1 - α)⌉-th smallest of theirs holds the true class of a new row of the same
kind with probability from 1 - α to 1 - α + 1/(n + 1). The score is -log p of the true class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor

from fedvlm.errors import DataError, SettingsError
from fedvlm.maths.calibration import fit_log_temperature


@dataclass(frozen=True)
class Calibration:
    """One client's: how warm its logits are, and the scores of the rows set aside."""

    log_heat: float  # log τ
    rows: int  # validation rows that τ is from; 0: from none, and τ is 1
    scores: Tensor  # (n,) float64
    labels: Tensor  # (n,) int64

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """log p, in float64: a sure classifier's scores would all be 0 in float32."""
        return (logits.double() / torch.tensor(self.log_heat).double().exp()).log_softmax(1)


def calibrate(val_logits: Tensor, val_y: Tensor, calibration_logits: Tensor, calibration_y: Tensor) -> Calibration:
    """From logits and labels of validation rows, and of rows that nothing else has read."""
    log_temperature = float(fit_log_temperature(val_logits.double(), val_y)) if len(val_y) else 0.0
    empty = Calibration(log_temperature, len(val_y), torch.zeros(0).double(), calibration_y)
    if not len(calibration_y):
        return empty
    scores = -empty.log_probabilities(calibration_logits).gather(1, calibration_y[:, None])[:, 0]
    return Calibration(log_temperature, len(val_y), scores, calibration_y)


def min_samples(coverage: float) -> int:
    """The fewest rows that can promise a coverage: the quantile is then the largest of them."""
    level = Fraction(str(coverage))
    return ceil(level / (1 - level))


def score_limits(calibration: Calibration, classes: Sequence[str], coverage: float) -> Tensor:
    """(classes,): the largest score with which a class is in a set.

    A class with enough rows has a limit of its own, so that the promise holds for it too. The
    others share one of their rows, or where those are too few all classes share one.
    """
    if not 0 < coverage < 1:
        raise SettingsError(f"coverage = {coverage} is outside (0, 1); 0.95 is usual")
    required, count = min_samples(coverage), len(calibration.labels)
    if count < required:
        raise DataError(
            f"coverage {coverage:g} needs {required} rows set aside, and {count} are there; a third "
            f"of the validation rows is set aside, so give the client {3 * required} of those, or ask "
            + (f"for {largest_coverage(count):g}" if count > 1 else "for none")
        )
    by_class = torch.bincount(calibration.labels, minlength=len(classes))
    rich = by_class >= required
    rest = int(by_class[~rich].sum())
    if rest < required and not rich.all():
        return _quantile(calibration.scores, coverage).expand(len(classes)).clone()
    out = torch.empty(len(classes), dtype=torch.float64)
    for label in rich.nonzero().flatten().tolist():
        out[label] = _quantile(calibration.scores[calibration.labels == label], coverage)
    if not rich.all():
        out[~rich] = _quantile(calibration.scores[~rich[calibration.labels]], coverage)
    return out


def _quantile(scores: Tensor, coverage: float) -> Tensor:
    rank = ceil((len(scores) + 1) * Fraction(str(coverage)))
    return scores.sort().values[rank - 1]


def largest_coverage(count: int) -> float:
    """The largest coverage of whole per cents that so many rows can promise."""
    return next(p for p in range(99, 0, -1) if min_samples(p / 100) <= count) / 100
