"""Contrastive losses with several positives for each row."""

from torch import Tensor


def soft_cross_entropy(logits: Tensor, positives: Tensor) -> Tensor:
    """Cross-entropy against the uniform distribution over the positives of each row."""
    target = positives.float()
    target = target / target.sum(1, keepdim=True).clamp_min(1)
    return -(target * logits.log_softmax(1)).sum(1).mean()


def both_ways(logits: Tensor, positives: Tensor) -> Tensor:
    """From pictures to captions and from captions to pictures."""
    return soft_cross_entropy(logits, positives) + soft_cross_entropy(logits.T, positives.T)
