"""Temperatures that make a classifier as sure as it is right, and two classifiers mixed by them."""

from math import log

import torch
from torch import Tensor

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
