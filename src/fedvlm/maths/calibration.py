"""Calibrate classifiers: temperatures, mixtures on logits, and prediction sets of guaranteed coverage.

Prediction sets are split conformal: with n samples that nothing else has used, the set of all classes whose score is at
most the ⌈(n + 1)(1 - α)⌉-th smallest of theirs contains the true class of a new sample of the same distribution with
probability from 1 - α to 1 - α + 1/(n + 1). The score is -log p of the true class.

Steps are fixed in number and nothing branches on values, so that engines may vmap it; scipy's optimisers would not do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log

import torch
from torch import Tensor

from fedvlm.core.schema import OPEN_FRACTION, check_range
from fedvlm.errors import DataError

MIN_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE = log(1e-2), log(1e3)
BISECTION_STEPS = 12  # to an interval of 3e-3
NEWTON_STEPS = 2  # each squares the error
GAUSS_NEWTON_STEPS = 25
MAX_STEP = 1.0  # in log weight
STEP_TOLERANCE = 1e-7  # of a log weight that has converged
WEIGHT_PRIOR_STD = 1.0  # of a log weight around its start, so that few samples move it little
TEMPERATURE_PRIOR_STD = 2.0  # of one classifier's log temperature


def fit_log_temperature(logits: Tensor, y: Tensor) -> Tensor:
    """Return log τ at which the mean confidence of softmax(logits/τ) is the accuracy; 0 without samples.

    There is one for every classifier of (..., samples, classes); y = -1 is padding. The accuracy is clamped above
    chance and, for n samples, below 1 - 1/(2n), because no finite temperature gives a confidence of 1.
    """
    real = y >= 0
    n_samples = real.sum().clamp(min=1)
    best, predictions = logits.max(-1)
    n_correct = ((predictions == y) & real).sum(-1)
    chance = 1 / logits.shape[-1]
    accuracy = torch.minimum(n_correct / n_samples, 1 - 0.5 / n_samples).clamp(min=chance + 1e-3)
    sample_weights = (real / n_samples).to(logits.dtype)
    shifted_logits = logits - best[..., None]
    log_temperature = torch.full_like(accuracy, (MIN_LOG_TEMPERATURE + MAX_LOG_TEMPERATURE) / 2)
    step = (MAX_LOG_TEMPERATURE - MIN_LOG_TEMPERATURE) / 4
    for _ in range(BISECTION_STEPS):
        exp_logits = (shifted_logits * (-log_temperature).exp()[..., None, None]).exp()
        confidence = exp_logits.sum(-1).reciprocal()
        log_temperature = log_temperature + step * ((confidence @ sample_weights) - accuracy).sign()
        step /= 2
    for _ in range(NEWTON_STEPS):  # within the interval that is left
        scaled = shifted_logits * (-log_temperature).exp()[..., None, None]
        exp_logits = scaled.exp()
        confidence = exp_logits.sum(-1).reciprocal()
        derivative = (confidence.square() * (exp_logits * scaled).sum(-1)) @ sample_weights
        newton_step = (confidence @ sample_weights - accuracy) / -derivative.clamp(max=-1e-20)
        log_temperature = log_temperature + newton_step.clamp(-4 * step, 4 * step)
        log_temperature = log_temperature.clamp(MIN_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE)
    return torch.where(real.any(), log_temperature, 0.0)


def fuse_logits(first: Tensor, second: Tensor) -> Tensor:
    """Return log of η p + (1 - η) q with η = a/(a + b), where a and b are the largest probabilities of p and q.

    It takes calibrated logits (samples, classes) and returns log-probabilities.
    """
    p, q = first.log_softmax(1), second.log_softmax(1)
    odds = p.amax(1, keepdim=True) - q.amax(1, keepdim=True)  # log a/b
    sigmoid = torch.nn.functional.logsigmoid
    return torch.logaddexp(sigmoid(odds) + p, sigmoid(-odds) + q)


def combine_logits(first: Tensor, second: Tensor, log_temperatures: Tensor | None) -> Tensor:
    """Return the log-probabilities of two classifiers together: fused at their log τ, or averaged without."""
    if log_temperatures is None:
        return average_logits(first, second)
    return fuse_logits(first / log_temperatures[0].exp(), second / log_temperatures[1].exp())


def average_logits(first: Tensor, second: Tensor) -> Tensor:
    """Return log of (p + q)/2."""
    return torch.logaddexp(first.log_softmax(1), second.log_softmax(1)) - log(2)


def fold_bias(weight: Tensor, bias: Tensor, means: Tensor, has_samples: Tensor) -> Tensor:
    """Return a (classes, dim) head without bias, calibrated on the class means.

    A bias b_c becomes b_c (μ·x)/|μ|², which is b_c at the mean μ of the class means, and nearly so where samples lie
    close to it.
    """
    centre = means.sum(0) / has_samples.sum().clamp(min=1)
    lift = centre / centre.square().sum().clamp(min=1e-9)
    out = weight + torch.where(has_samples, bias, 0.0)[:, None] * lift
    y = torch.where(has_samples, torch.arange(len(means), device=means.device), -1)
    return out / fit_log_temperature(means @ out.mT, y).exp()


def fit_log_weights(logits: Tensor, y: Tensor, start: Tensor, prior_std: float = WEIGHT_PRIOR_STD) -> Tensor:
    """Return (classifiers,) log weights u of (classifiers, samples, classes) whose mixture has the highest likelihood.

    The objective is the cross-entropy plus |u - start|² / (2 prior_std²): without samples (y = -1) it is the start.
    """
    real = (y >= 0).to(logits.dtype)
    index = y.clamp(min=0).expand(logits.shape[:-1])[..., None]
    true_logits = logits.gather(-1, index)[..., 0]
    eye = torch.eye(len(start), dtype=logits.dtype, device=logits.device)
    u = start
    for _ in range(GAUSS_NEWTON_STEPS):
        weight = u.exp()
        p = (weight[:, None, None] * logits).sum(0).softmax(-1)
        mean = (p * logits).sum(-1)
        gradient = weight * ((mean - true_logits) * real).sum(-1)
        deviations = (logits - mean[..., None]) * (p.sqrt() * real[:, None])
        flat = weight[:, None] * deviations.flatten(1)
        hessian = flat @ flat.mT + eye * (gradient.clamp(min=0) + prior_std**-2)
        step = torch.linalg.solve(hessian, gradient + (u - start) * prior_std**-2)
        u = u - step.clamp(-MAX_STEP, MAX_STEP)
        if float(step.abs().max()) < STEP_TOLERANCE:
            break
    return u


def fit_log_scale(logits: Tensor, y: Tensor, prior_std: float = TEMPERATURE_PRIOR_STD) -> Tensor:
    """Return the log of the best factor for one classifier's logits; 0 without samples."""
    return fit_log_weights(logits[None], y, logits.new_zeros(1), prior_std)[0]


@dataclass(frozen=True)
class Calibration:
    """The temperature of a client's classifier, and the scores of its calibration samples."""

    log_temperature: float  # log τ
    rows: int  # validation samples that τ is fitted on; 0: τ is 1
    scores: Tensor  # (n,) float64
    labels: Tensor  # (n,) int64
    findings: "tuple[Calibration, ...]" = ()  # of each finding, if an image may have several; the rest is then empty

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log p in float64: in float32 the scores of a confident classifier would all be 0.

        With several findings per image it is (samples, findings), log p of each being present.
        """
        if self.findings:
            pairs = zip(self.findings, logits.unbind(1), strict=True)
            return torch.stack([part.log_probabilities(binary_logits(odds))[:, 1] for part, odds in pairs], dim=1)
        return (logits.double() / torch.tensor(self.log_temperature).double().exp()).log_softmax(1)


def calibrate(val_logits: Tensor, val_y: Tensor, calibration_logits: Tensor, calibration_y: Tensor) -> Calibration:
    """Calibrate by logits and labels of validation samples, and of calibration samples that nothing else has used."""
    log_temperature = float(fit_log_temperature(val_logits.double(), val_y)) if len(val_y) else 0.0
    empty = Calibration(log_temperature, len(val_y), torch.zeros(0).double(), calibration_y)
    if not len(calibration_y):
        return empty
    scores = -empty.log_probabilities(calibration_logits).gather(1, calibration_y[:, None])[:, 0]
    return Calibration(log_temperature, len(val_y), scores, calibration_y)


def binary_logits(log_odds: Tensor) -> Tensor:
    """Return (samples, 2) the logits of absent and present."""
    return torch.stack([torch.zeros_like(log_odds), log_odds], dim=1)


def calibrate_findings(val_logits: Tensor, val_y: Tensor, logits: Tensor, y: Tensor) -> Calibration:
    """Calibrate each finding by the samples whose label is known."""
    fits = []
    for finding in range(y.shape[1]):
        known, val_known = y[:, finding] >= 0, val_y[:, finding] >= 0
        val_binary, binary = binary_logits(val_logits[val_known, finding]), binary_logits(logits[known, finding])
        fits.append(calibrate(val_binary, val_y[val_known, finding], binary, y[known, finding]))
    return Calibration(0.0, min(fit.rows for fit in fits), y.new_zeros(0).double(), y.new_zeros(0), tuple(fits))


def min_samples(coverage: float) -> int:
    """Return the fewest calibration samples that can guarantee a coverage."""
    level = Fraction(str(coverage))
    return ceil(level / (1 - level))


def score_limits(calibration: Calibration, classes: Sequence[str], coverage: float) -> Tensor:
    """Return (classes,): the largest score with which a class is in a prediction set.

    A class with enough samples has its own limit, so that the coverage holds for it too. The others share one limit; if
    their samples are too few, all classes share one.
    """
    check_range("coverage", coverage, OPEN_FRACTION)
    required, count = min_samples(coverage), len(calibration.labels)
    if count < required:
        raise DataError(
            f"coverage {coverage:g} needs {required} calibration samples, got {count}; a third of the validation "
            f"samples is used for calibration, so give the client {3 * required} of those, or "
            + (f"ask for a coverage of {largest_coverage(count):g}" if count > 1 else "ask for no coverage")
        )
    by_class = torch.bincount(calibration.labels, minlength=len(classes))
    has_enough = by_class >= required
    if int(by_class[~has_enough].sum()) < required and not has_enough.all():
        return _quantile(calibration.scores, coverage).expand(len(classes)).clone()
    out = torch.empty(len(classes), dtype=torch.float64)
    for label in has_enough.nonzero().flatten().tolist():
        out[label] = _quantile(calibration.scores[calibration.labels == label], coverage)
    if not has_enough.all():
        out[~has_enough] = _quantile(calibration.scores[~has_enough[calibration.labels]], coverage)
    return out


def _quantile(scores: Tensor, coverage: float) -> Tensor:
    rank = ceil((len(scores) + 1) * Fraction(str(coverage)))
    return scores.sort().values[rank - 1]


def largest_coverage(count: int) -> float:
    """Return the largest coverage, in whole per cent, that so many samples can guarantee."""
    return next(p for p in range(99, 0, -1) if min_samples(p / 100) <= count) / 100
