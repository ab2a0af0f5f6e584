"""Temperatures that make a classifier as sure as it is right, and two classifiers mixed by them."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log

import torch
from torch import Tensor

from fedvlm.errors import DataError, SettingsError

MIN_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE = log(1e-2), log(1e3)  # of log τ
BISECTION_STEPS = 12  # of that range: to 3e-3
NEWTON_STEPS = 2  # to the square of it, and again


def fit_log_temperature(logits: Tensor, y: Tensor) -> Tensor:
    """log τ at which the mean confidence of softmax(logits/τ) is the accuracy; 0 without rows.

    One for every classifier of (..., rows, classes). Rows of y = -1 are padding. The accuracy is
    kept off chance and, for n rows, below 1 - 1/(2n), because no finite temperature is as sure as
    a perfect score.
    """
    real = y >= 0
    n_samples = real.sum().clamp(min=1)
    best, predictions = logits.max(-1)
    n_correct = ((predictions == y) & real).sum(-1)
    chance = 1 / logits.shape[-1]
    accuracy = torch.minimum(n_correct / n_samples, 1 - 0.5 / n_samples).clamp(min=chance + 1e-3)
    sample_weights = (real / n_samples).to(logits.dtype)
    shifted_logits = logits - best[..., None]
    log_temperature, step = (
        torch.full_like(accuracy, (MIN_LOG_TEMPERATURE + MAX_LOG_TEMPERATURE) / 2),
        (MAX_LOG_TEMPERATURE - MIN_LOG_TEMPERATURE) / 4,
    )
    for _ in range(BISECTION_STEPS):
        exp_logits = (shifted_logits * (-log_temperature).exp()[..., None, None]).exp()
        log_temperature = (
            log_temperature + step * ((exp_logits.sum(-1).reciprocal() @ sample_weights) - accuracy).sign()
        )
        step /= 2
    for _ in range(NEWTON_STEPS):  # by Newton, never farther than the interval that is left
        scaled = shifted_logits * (-log_temperature).exp()[..., None, None]
        exp_logits = scaled.exp()
        confidence = exp_logits.sum(-1).reciprocal()
        derivative = (confidence.square() * (exp_logits * scaled).sum(-1)) @ sample_weights
        newton_step = (confidence @ sample_weights - accuracy) / -derivative.clamp(max=-1e-20)
        log_temperature = (log_temperature + newton_step.clamp(-4 * step, 4 * step)).clamp(
            MIN_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE
        )
    return torch.where(real.any(), log_temperature, 0.0)


def fuse_logits(first: Tensor, second: Tensor) -> Tensor:
    """log of η p + (1 - η) q with η = a/(a + b), where a and b are the two largest probabilities.

    Takes calibrated logits (rows, classes); what comes out are log-probabilities.
    """
    p, q = first.log_softmax(1), second.log_softmax(1)
    odds = p.amax(1, keepdim=True) - q.amax(1, keepdim=True)  # log a/b
    sigmoid = torch.nn.functional.logsigmoid
    return torch.logaddexp(sigmoid(odds) + p, sigmoid(-odds) + q)


def combine_logits(first: Tensor, second: Tensor, log_temperatures: Tensor | None) -> Tensor:
    """Two classifiers' logits as one: fused at their temperatures (log τ), or averaged without."""
    if log_temperatures is None:
        return average_logits(first, second)
    return fuse_logits(first / log_temperatures[0].exp(), second / log_temperatures[1].exp())


def average_logits(first: Tensor, second: Tensor) -> Tensor:
    """log of (p + q)/2."""
    return torch.logaddexp(first.log_softmax(1), second.log_softmax(1)) - log(2)


def fold_bias(weight: Tensor, bias: Tensor, means: Tensor, has_samples: Tensor) -> Tensor:
    """(classes, dim): a linear classifier of rows that share a mean, as sure as a head should be.

    A bias b_c becomes b_c (μ·x)/|μ|², which is b_c but for the rows' spread around the mean μ of
    the class means. The temperature is that of the class means, each a row of its class.
    """
    centre = means.sum(0) / has_samples.sum().clamp(min=1)
    lift = centre / centre.square().sum().clamp(min=1e-9)
    out = weight + torch.where(has_samples, bias, 0.0)[:, None] * lift
    y = torch.where(has_samples, torch.arange(len(means), device=means.device), -1)
    return out / fit_log_temperature(means @ out.mT, y).exp()


STEPS = 25
MAX_STEP = 1.0  # of a step in log weight
WEIGHT_PRIOR_STD = 1.0  # deviation of a log weight around where it starts, so few rows move it little
TEMPERATURE_PRIOR_STD = 2.0  # the same for one classifier's temperature


def fit_log_weights(logits: Tensor, y: Tensor, start: Tensor, prior_std: float = WEIGHT_PRIOR_STD) -> Tensor:
    """(many,) log weights of (many, rows, classes) at which their sum explains y best.

    The objective is the rows' cross-entropy plus |u - start|² / 2 belief²: without rows (y = -1)
    it is the start. Gauss-Newton, a fixed number of short steps.
    """
    real = (y >= 0).to(logits.dtype)
    index = y.clamp(min=0).expand(logits.shape[:-1])[..., None]
    true_logits = logits.gather(-1, index)[..., 0]
    eye = torch.eye(len(start), dtype=logits.dtype, device=logits.device)
    u = start
    for _ in range(STEPS):
        weight = u.exp()
        p = (weight[:, None, None] * logits).sum(0).softmax(-1)
        mean = (p * logits).sum(-1)
        gradient = weight * ((mean - true_logits) * real).sum(-1)
        deviations = (logits - mean[..., None]) * (p.sqrt() * real[:, None])
        flat = weight[:, None] * deviations.flatten(1)
        hessian = flat @ flat.mT + eye * (gradient.clamp(min=0) + prior_std**-2)
        step = torch.linalg.solve(hessian, gradient + (u - start) * prior_std**-2)
        u = u - step.clamp(-MAX_STEP, MAX_STEP)
    return u


def fit_log_scale(logits: Tensor, y: Tensor, prior_std: float = TEMPERATURE_PRIOR_STD) -> Tensor:
    """Return the log of the best factor for one classifier's logits; 0 without samples."""
    return fit_log_weights(logits[None], y, logits.new_zeros(1), prior_std)[0]


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
