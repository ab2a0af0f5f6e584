"""Mix linear heads on their logits, weighted by the likelihood of validation samples: shared ones, and a client's."""

import math
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from fedvlm.maths import logistic_regression
from fedvlm.maths.calibration import fit_log_scale, fit_log_weights
from fedvlm.maths.gaussian_classes import class_membership
from fedvlm.maths.logistic_regression import MAX_SAMPLE_LOSS, MAX_STEPS, Head, split_head, summed_cross_entropy
from fedvlm.maths.unlabelled import Frequencies, Labelled, MixturePrior, fit_mixture, mix_in

CANDIDATE_WEIGHTS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
FIXED_WEIGHTS = (0.0, 1 / 16, 1 / 4, 1.0)
MAX_FIT_PRODUCTS = 1.3e9  # multiplications of samples by directions by classes in a fit; above, it takes fewer steps
MIN_LOG_FRACTION = -20.0  # of a head in a client's mix
MIXES_PER_CHUNK = 8  # all at once would need much memory
LOG10_PENALTIES = (2, 1, 0, -1, -2, -3, -4)  # of a client's own regression: log10 of ridge · n_samples
PRIOR_STRENGTHS = (1.0, 10**0.5, 10.0, 10**1.5, 100.0, 1e4)  # samples that equal class frequencies count for


class MixPrior(NamedTuple):
    """Beliefs about a client's mix before its validation samples are seen (docs/explanation/auto.md: how chosen)."""

    local_samples: float = 256.0  # samples with which the local head weighs as much as the shared one
    likelihood_power: float = 0.5  # of the validation likelihood in the fractions of shared and local head
    log10_penalty: float = 0.0  # of the local head: mean and
    log10_penalty_std: float = 2.0
    poisoned: float = 0.1  # probability that the shared head is worse for the client than the start head
    start_anchor: float = 0.01  # probability that the local head had better be drawn to the start head
    steps: int = MAX_STEPS  # of its regression, at most
    temperature_std: float = 0.5  # of the log scale of a head's logits
    equal_classes: float = 0.95  # probability that the client's classes are equally frequent
    frequency_log_weight: float = -0.7
    mixture: MixturePrior = MixturePrior()

    def frequencies(self, like: Tensor) -> Frequencies:
        """Return the prior of class frequencies."""
        n_skewed = len(PRIOR_STRENGTHS) - 1
        probabilities = [(1 - self.equal_classes) / n_skewed] * n_skewed + [self.equal_classes]
        return Frequencies(like.new_tensor(PRIOR_STRENGTHS), like.new_tensor(probabilities))


class ClientMix(NamedTuple):
    """A client's head, and the weights of the shared head, the local head, the class prior and unlabelled samples."""

    head: Head
    own: Tensor  # (classes, dim + 1): the head without the part of the shared head
    weights: Tensor  # (4,)


def mix_grid(n_fixed: int) -> Tensor:
    """Return (mixes, 1 + n_fixed): every choice of a weight for one candidate and for each fixed head."""
    return torch.tensor(list(product(CANDIDATE_WEIGHTS, *[FIXED_WEIGHTS] * n_fixed)), dtype=torch.float64)


def mix_losses(candidates: Tensor, fixed: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return (candidates, mixes): the summed cross-entropy of each mix of a candidate with the fixed heads.

    Heads are (..., classes, dim + 1), as `Head.joined` returns them.
    """
    grid, fixed_logits = mix_grid(len(fixed)).to(x), split_head(fixed).logits(x)
    losses = []
    for candidate in candidates:
        logits = torch.cat([split_head(candidate).logits(x)[None], fixed_logits])
        chunks = torch.split(grid, MIXES_PER_CHUNK)
        mixed = (torch.einsum("mj,jnk->mnk", weights, logits) for weights in chunks)
        losses.append(torch.cat([summed_cross_entropy(mix, y, MAX_SAMPLE_LOSS) for mix in mixed]))
    return torch.stack(losses)


def average_mixes(candidates: Tensor, fixed: Tensor, losses: Tensor) -> Tensor:
    """Return the (classes, dim + 1) average of all mixes, weighted by their likelihood exp(-loss)."""
    likelihood = (losses.min() - losses).exp().double().view(len(candidates), -1)
    weights = torch.einsum("cm,mj->cj", likelihood / likelihood.sum(), mix_grid(len(fixed)))
    mixed = (weights[:, 0, None, None] * candidates.double()).sum(0)
    return mixed + (weights[:, 1:].sum(0)[:, None, None] * fixed.double()).sum(0)


def mix_client(shared: Head, start_head: Head, client: Labelled, unlabelled: Tensor, prior: MixPrior) -> ClientMix:
    """Mix the shared head, a regression on the client's samples near it, and the client's class frequencies.

    Without samples the mix is the shared head: the other parts grow with the number of samples, and validation samples
    move all weights from there. `start_head` is zero-shot, or zeros: what is left if the shared head is poisoned.
    Samples without a label then pull the mix to Gaussian classes, as far as validation samples are more likely.
    """
    dtype = torch.float64 if fit_steps(client, len(shared.bias)) == MAX_STEPS else torch.float32
    shared, start_head = (Head(*(part.to(dtype) for part in head)) for head in (shared, start_head))
    client = client._replace(x=client.x.to(dtype), val_x=client.val_x.to(dtype))
    trust = trust_in_shared(shared, start_head, client, prior)
    received, shared = shared, Head(*(trust * a + (1 - trust) * b for a, b in zip(shared, start_head, strict=True)))
    counts = class_membership(client.y, len(shared.bias)).sum(0).to(dtype)
    n_samples, frequencies = counts.sum(), prior.frequencies(counts)
    prior_head = Head(torch.zeros_like(shared.weight), frequencies.log_prior(counts))
    local = local_head(shared, start_head, client, prior)
    heads = torch.stack([head.joined() for head in (shared, local, prior_head)])
    logits, std = split_head(heads).logits(client.val_x), prior.temperature_std
    scales = torch.stack([fit_log_scale(part, client.val_y, std) for part in logits[:2]])
    losses = summed_cross_entropy(scales.exp()[:, None, None] * logits[:2], client.val_y)
    samples = torch.stack([torch.full_like(n_samples, prior.local_samples), n_samples.clamp(min=1e-9)])
    fractions = (samples.log() - prior.likelihood_power * losses).log_softmax(0).clamp(min=MIN_LOG_FRACTION)
    start = torch.cat([scales + fractions, scales.new_full((1,), prior.frequency_log_weight)])
    weights = fit_log_weights(logits, client.val_y, start).exp()
    head, mixture_weight = split_head((weights[:, None, None] * heads).sum(0)), weights.new_zeros(())
    if len(unlabelled):
        mixture = fit_mixture(head, client, unlabelled.to(dtype), frequencies, prior.mixture)
        head, mixture_weight = mix_in(head, mixture, client.val_x, client.val_y, prior.mixture)
    weights = torch.cat([trust * weights[:1], weights[1:]]) * (1 - mixture_weight)
    own = head.joined() - weights[0] * received.joined()
    return ClientMix(head, own, torch.cat([weights, mixture_weight[None]]))


def trust_in_shared(shared: Head, start_head: Head, client: Labelled, prior: MixPrior) -> Tensor:
    """Return from 0 to 1 how far the client's labelled samples allow the shared head to replace the start head.

    It is 1 unless the samples are less likely by the shared head, which has been trained on them unless it is poisoned.
    """
    x, y, losses = torch.cat([client.x, client.val_x]), torch.cat([client.y, client.val_y]), []
    for head in (shared, start_head):
        logits = head.logits(x)
        losses.append(summed_cross_entropy(fit_log_scale(logits, y, prior.temperature_std).exp() * logits, y))
    excess = (losses[0] - losses[1]).clamp(0, 100)
    return 1 / (1 + prior.poisoned * excess.expm1())


def fit_steps(client: Labelled, n_classes: int) -> int:
    """Return the steps of a client's own regression: fewer for many samples and classes, and then in float32."""
    n_samples = int((client.y >= 0).sum())
    products = n_samples * min(n_samples, client.x.shape[1]) * n_classes
    return int(min(max(MAX_FIT_PRODUCTS // max(products, 1), 1), MAX_STEPS))


def local_head(shared: Head, start_head: Head, client: Labelled, prior: MixPrior) -> Head:
    """Return the average of regressions on the client's samples, drawn to the shared or the start head by a ridge.

    Their weights are their prior probability times the likelihood of the validation samples.
    """
    n_steps = fit_steps(client, len(shared.bias))
    log10_penalties = client.x.new_tensor(LOG10_PENALTIES[:: 1 if n_steps == MAX_STEPS else 2])
    ridges = 10**log10_penalties / (client.y >= 0).sum().clamp(min=1)
    all_classes = torch.ones(len(shared.bias), dtype=torch.bool, device=client.y.device)
    anchors = Head(
        *(torch.stack(pair).repeat_interleave(len(ridges), 0) for pair in zip(shared, start_head, strict=True))
    )
    both = ridges.repeat(2)
    path = logistic_regression.fit_ridge_path(
        client.x, client.y, both, anchors, all_classes, min(n_steps, prior.steps), bias_ridge=both[:, None]
    )
    heads = path.heads.joined()
    logits = split_head(heads).logits(client.val_x)
    scales = torch.stack([fit_log_scale(part, client.val_y, prior.temperature_std) for part in logits]).exp()
    log_prior = (-((log10_penalties - prior.log10_penalty) / prior.log10_penalty_std).square() / 2).log_softmax(0)
    log_prior = torch.cat([log_prior + math.log(1 - prior.start_anchor), log_prior + math.log(prior.start_anchor)])
    weights = (log_prior - summed_cross_entropy(scales[:, None, None] * logits, client.val_y)).softmax(0) * scales
    return split_head((weights[:, None, None] * heads).sum(0))
