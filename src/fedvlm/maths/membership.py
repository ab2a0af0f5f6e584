"""How well a row's score tells whether it was among those that somebody learnt from."""

import torch
from torch import Tensor


def roc_auc(members: Tensor, non_members: Tensor) -> float:
    """The chance that a member scores above another row; half a chance where they tie."""
    ordered = non_members.sort().values
    below = torch.searchsorted(ordered, members) + torch.searchsorted(ordered, members, right=True)
    return (below.double().mean() / (2 * len(non_members))).item()


def roc_auc_by_class(
    members: Tensor, member_labels: Tensor, non_members: Tensor, non_member_labels: Tensor
) -> float | None:
    """`area` within each class, classes weighing as many as their pairs; None without a pair.

    Within a class, because else a score that only knows which classes are common would pass.
    """
    total = pairs = 0.0
    for label in sorted(set(member_labels.tolist())):
        class_members, class_non_members = members[member_labels == label], non_members[non_member_labels == label]
        if weight := len(class_members) * len(class_non_members):
            total += weight * roc_auc(class_members, class_non_members)
            pairs += weight
    return total / pairs if pairs else None


def mean_similarities(x: Tensor, y: Tensor, means: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Two scores of rows by an uploaded mean: likeness to it, and to what sets it apart.

    `means` and `known` (classes, dim) are the client's and what the others' uploads lead one to
    expect, zero where they say nothing. A mean of n rows leans towards each of them by 1/n, which
    shows best once the direction that all rows of the class share has been taken away.
    """
    return (x * means[y]).sum(dim=1), (x * (means - expected)[y]).sum(dim=1)
