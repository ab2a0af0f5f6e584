"""Classifiers mixed by weights on their logits, chosen by likelihood: linear ones stay linear."""

import torch
from torch import Tensor

from fedvlm.maths.probe import summed_cross_entropy

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


def fit_log_scale(logits: Tensor, y: Tensor) -> Tensor:
    """log of what one classifier's logits are to be multiplied by; 0 without rows."""
    return fit_log_weights(logits[None], y, logits.new_zeros(1), TEMPERATURE_PRIOR_STD)[0]


def likelihood_weights(logits: Tensor, y: Tensor) -> Tensor:
    """(many,) weights of classifiers of one family: each at its temperature, by its likelihood.

    With many rows the best one gets nearly all; with few they share, which is the margin.
    """
    log_scales = torch.stack([fit_log_scale(classifier_logits, y) for classifier_logits in logits])
    scaled_losses = summed_cross_entropy(log_scales.exp()[:, None, None] * logits, y)
    return (-scaled_losses).softmax(0) * log_scales.exp()
