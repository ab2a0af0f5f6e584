"""Learn from a client's samples without a label: EM of Gaussian classes that starts at a classifier's probabilities.

Beside the classes there is a background component at the mean of the class means, for images of other classes. A sample
without a label weighs at most as much as one with a label. Nothing of this leaves the client.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.maths import gaussian_classes
from fedvlm.maths.calibration import fit_log_scale
from fedvlm.maths.gaussian_classes import Moments, class_membership
from fedvlm.maths.logistic_regression import Head, summed_cross_entropy
from fedvlm.maths.ridge_regression import class_log_prior

BACKGROUND_SAMPLES = 20  # that the belief about the fraction of the background counts for
SHARE_STEPS = 5  # in which an E-step finds the client's class frequencies
MIN_SOFT_COUNT = 0.5  # samples below which a class has no mean
MIXTURE_WEIGHTS = (1 / 4, 1 / 2, 3 / 4, 1.0)  # of the mixture beside the start; 0 is tried as well


class MixturePrior(NamedTuple):
    """Beliefs about samples without a label (docs/explanation/auto.md: how chosen)."""

    steps: int = 1  # of EM
    useless: float = 0.8  # probability that the mixture had better not be used
    start_temperature_std: float = 1.0  # of the log scale of logits in an E-step
    temperature_std: float = 0.5  # of the log scale of the mixture's logits in the end
    background: float = 0.05  # fraction of samples of other classes; its estimate stays within
    min_background: float = 0.01
    max_background: float = 0.9


class Labelled(NamedTuple):
    """A client's samples with a label; y = -1 is padding."""

    x: Tensor
    y: Tensor
    val_x: Tensor
    val_y: Tensor


class Frequencies(NamedTuple):
    """A Dirichlet prior of class frequencies: its strengths, and their probabilities."""

    strengths: Tensor
    probabilities: Tensor

    def log_prior(self, counts: Tensor) -> Tensor:
        uniform = torch.full_like(counts, 1 / len(counts))
        return class_log_prior(counts, uniform, self.strengths, self.probabilities)


def fit_mixture(
    start: Head, labelled: Labelled, unlabelled: Tensor, frequencies: Frequencies, prior: MixturePrior
) -> Head:
    """Return the classifier of Gaussian classes after EM steps from the probabilities of `start`.

    Validation samples set temperatures and class frequencies only. Rows of zeros are padding.
    """
    n_classes, head = len(start.bias), start
    truth, val_truth = (class_membership(y, n_classes).to(unlabelled.dtype) for y in (labelled.y, labelled.val_y))
    counts = truth.sum(0) + val_truth.sum(0)
    x = torch.cat([labelled.x * (labelled.y >= 0)[:, None], unlabelled])
    for _ in range(prior.steps):
        logits = _with_background(head, labelled, unlabelled, prior)
        soft, log_prior = _e_step(logits, counts, frequencies, prior)
        head = _m_step(x, torch.cat([truth, soft]))
    scale = fit_log_scale(head.logits(labelled.val_x), labelled.val_y, prior.temperature_std).exp()
    return Head(scale * head.weight, scale * head.bias + log_prior)


def _with_background(head: Head, labelled: Labelled, x: Tensor, prior: MixturePrior) -> Tensor:
    """Return (samples, classes + 1) logits at the temperature of the validation samples, those of the background last.

    For Gaussian classes the background at the mean of their means has the mean of their logits, and half of the margin
    by which samples of a class exceed it. Rows of padding get minus infinity throughout but for the background.
    """
    val_logits = head.logits(labelled.val_x)
    scale = fit_log_scale(val_logits, labelled.val_y, prior.start_temperature_std).exp()
    real = (labelled.val_y >= 0).to(scale.dtype)
    true_logits = val_logits.gather(1, labelled.val_y.clamp(min=0)[:, None])[:, 0]
    margin = ((true_logits - val_logits.mean(1)) * real).sum() / real.sum().clamp(min=1)
    logits = head.logits(x)
    background = logits.mean(1, keepdim=True) + margin.clamp(min=0) / 2
    is_padding = (x == 0).all(1, keepdim=True)
    classes = torch.where(is_padding, -torch.inf, scale * logits)
    return torch.cat([classes, torch.where(is_padding, 0.0, scale * background)], dim=1)


def _e_step(logits: Tensor, counts: Tensor, frequencies: Frequencies, prior: MixturePrior) -> tuple[Tensor, Tensor]:
    """Return (samples, classes) responsibilities, and the log of the client's class frequencies over equal ones."""
    log_prior, background = frequencies.log_prior(counts), logits.new_tensor(prior.background)
    is_real = logits[:, 0].isfinite()
    for _ in range(SHARE_STEPS):
        log_fractions = torch.cat([(1 - background).log() - math.log(len(counts)) + log_prior, background.log()[None]])
        joint = (logits + log_fractions).softmax(1)
        n_background = torch.where(is_real, joint[:, -1], 0.0).sum() + BACKGROUND_SAMPLES * prior.background
        background = n_background / (is_real.sum() + BACKGROUND_SAMPLES)
        background = background.clamp(prior.min_background, prior.max_background)
        log_prior = frequencies.log_prior(counts + joint[:, :-1].sum(0))
    return joint[:, :-1], log_prior


def _m_step(x: Tensor, membership: Tensor) -> Head:
    """Return the discriminant of Gaussian classes; one with hardly any samples gets the mean of the others' biases."""
    counts, sums = membership.sum(0), membership.mT @ x
    has_samples = counts >= MIN_SOFT_COUNT
    means = torch.where(has_samples[:, None], sums / counts.clamp(min=MIN_SOFT_COUNT)[:, None], 0.0)
    counts = torch.where(has_samples, counts, 0.0)
    weighted = x * membership.sum(1, keepdim=True)
    scatter = weighted.mT @ x - (means * counts[:, None]).mT @ means
    moments = Moments(counts, means, (scatter + scatter.mT) / 2)
    rule = gaussian_classes.fit_discriminant(moments, gaussian_classes.ridge(moments, 1.0))
    mean_bias = torch.where(has_samples, rule.bias, 0.0).sum() / has_samples.sum().clamp(min=1)
    return Head(rule.weight, torch.where(has_samples, rule.bias, mean_bias))


def mix_in(start: Head, mixture: Head, x: Tensor, y: Tensor, prior: MixturePrior) -> tuple[Head, Tensor]:
    """Return the average of mixes of both heads, weighted by the validation likelihood, and the mixture's weight."""
    weights = start.bias.new_tensor((0.0, *MIXTURE_WEIGHTS))
    heads = Head(*(a + weights.view(-1, *[1] * a.ndim) * (b - a) for a, b in zip(start, mixture, strict=True)))
    rest = (1 - prior.useless) / len(MIXTURE_WEIGHTS)
    log_prior = start.bias.new_tensor((prior.useless, *[rest] * len(MIXTURE_WEIGHTS))).log()
    weight = (log_prior - summed_cross_entropy(heads.logits(x), y)).softmax(0) @ weights * (y >= 0).any()
    return Head(*(a + weight * (b - a) for a, b in zip(start, mixture, strict=True))), weight
