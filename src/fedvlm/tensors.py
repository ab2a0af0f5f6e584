"""Small operations over flat dicts of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedvlm.core import Tensors


def stack(many: Sequence[Tensors]) -> Tensors:
    """One dict with a leading axis, from dicts of the same keys and shapes."""
    return {key: torch.stack([one[key] for one in many]) for key in many[0]}


def select(stacked: Tensors, index: int) -> Tensors:
    """One dict out of a stacked one; a copy, so that the stack can be freed."""
    return {key: value[index].clone() for key, value in stacked.items()}


def copy(tensors: Tensors) -> Tensors:
    return {key: value.detach().clone() for key, value in tensors.items()}


def count_bytes(tensors: Tensors) -> int:
    return sum(value.numel() * value.element_size() for value in tensors.values())


def flat(tensors: Tensors) -> Tensor:
    """All floating-point values in one vector, by sorted key."""
    parts = [
        tensors[key].reshape(-1) for key in sorted(tensors) if tensors[key].is_floating_point()
    ]
    return torch.cat(parts) if parts else torch.zeros(0)


def difference(a: Tensors, b: Tensors) -> float:
    """The largest difference of two dicts relative to the largest value of either (0 if empty)."""
    worst = 0.0
    for key in a:
        gap = (a[key].double() - b[key].double()).abs()
        size = max(a[key].double().abs().max().item(), b[key].double().abs().max().item(), 1e-30)
        worst = max(worst, gap.max().item() / size) if gap.numel() else worst
    return worst
