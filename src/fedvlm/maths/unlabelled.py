"""Learn from a client's samples without a label: EM of Gaussian classes that starts at a classifier's probabilities.

Beside the classes there is a background component at the mean of the class means, for images of other classes. A sample
without a label weighs at most as much as one with a label. Nothing of this leaves the client.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.maths import gaussian_classes
from fedvlm.maths.calibration import fit_log_scale
from fedvlm.maths.gaussian_classes import Moments, class_membership
from fedvlm.maths.logistic_regression import Head, summed_cross_entropy
from fedvlm.maths.ridge_regression import class_log_prior

SHARE_STEPS = 5  # in which an E-step finds the client's class frequencies
MIN_SOFT_COUNT = 0.5  # samples below which a class has no mean
MIXTURE_WEIGHTS = (1 / 4, 1 / 2, 3 / 4, 1.0)  # of the mixture beside the start; 0 is tried as well


class MixturePrior(NamedTuple):
    """Beliefs about samples without a label (docs/explanation/auto.md: how chosen)."""

    steps: int = 2  # of EM
    useless: float = 0.5  # probability that the mixture had better not be used
    start_temperature_std: float = 1.0  # of the log scale of logits in an E-step
    temperature_std: float = 0.5  # of the log scale of the mixture's logits in the end
    background: float = 0.05  # fraction of samples of other classes, counted as 20 samples; within
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
    n_classes, head, has_background = len(start.bias), start, False
    truth = class_membership(labelled.y, n_classes)
    counts = truth.sum(0) + class_membership(labelled.val_y, n_classes).sum(0)
    x = torch.cat([labelled.x * (labelled.y >= 0)[:, None], unlabelled])
    for _ in range(prior.steps):
        scale = fit_log_scale(head.logits(labelled.val_x), labelled.val_y, prior.start_temperature_std).exp()
        soft, log_prior = _e_step(
            scale * head.logits(unlabelled), unlabelled, counts, frequencies, prior, has_background
        )
        head = _m_step(x, torch.cat([truth, soft]))
        has_background = True
    scale = fit_log_scale(head.logits(labelled.val_x), labelled.val_y, prior.temperature_std).exp()
    return Head(scale * head.weight, scale * head.bias + log_prior)


def _e_step(
    logits: Tensor, x: Tensor, counts: Tensor, frequencies: Frequencies, prior: MixturePrior, has_background: bool
) -> tuple[Tensor, Tensor]:
    """Return (samples, classes) responsibilities, and the log of the client's class frequencies over equal ones.

    The background has the logit 0, because discriminants are relative to the mean of the class means.
    """
    real = (x.abs().sum(1) > 0).to(logits.dtype)[:, None]
    log_prior, background = frequencies.log_prior(counts), logits.new_tensor(prior.background)
    for _ in range(SHARE_STEPS):
        of_classes = logits + log_prior
        if has_background:
            of_classes = of_classes + (1 - background).log() - logits.new_tensor(float(len(counts))).log()
            joint = torch.cat([of_classes, background.log().expand(len(x), 1)], dim=1).softmax(1) * real
            soft = joint[:, :-1]
            background = (joint[:, -1].sum() + 20 * prior.background) / (real.sum() + 20)
            background = background.clamp(prior.min_background, prior.max_background)
        else:
            soft = of_classes.softmax(1) * real
        log_prior = frequencies.log_prior(counts + soft.sum(0))
    return soft, log_prior


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
