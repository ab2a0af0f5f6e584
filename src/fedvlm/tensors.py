"""Small operations over flat dicts of tensors."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from math import inf, isnan
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class _Unloaded:
    """Stands where torch._dynamo will be once something compiles.

    torch.func switches compiled autograd off around every gradient, and for that alone would import
    the compiler: seconds in every process. Where it is not loaded there is nothing to switch off.
    """

    compiled_autograd = SimpleNamespace(_disable=nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("torch._dynamo"), name)  # which then takes this place itself


if "torch._dynamo" not in sys.modules:
    vars(torch)["_dynamo"] = _Unloaded()


T = TypeVar("T")
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def latest(function: Callable[..., T]) -> Callable[..., T]:
    """Remembers what came of the tensors of the latest call: what all clients share is worked out
    once in a process. Told by where they are and by their version, so in-place changes are seen;
    of tensors that have neither (in vmap, or of inference) nothing is remembered.
    """
    held: list[Any] = []

    def where(one: Tensor) -> Any:
        return one.data_ptr(), one._version, one.shape, one.stride(), one.dtype, one.device

    def remembering(*given: Tensor) -> T:
        if any(_wrapped(one) or one.is_inference() for one in given):
            return function(*given)
        known = [where(one) for one in given]
        found = held[0] if held else None  # taken once: another thread may put its own there
        if found is None or found[0] != known:
            found = known, given, function(*given)  # held, so that nothing takes their place
            held[:] = [found]
        out: T = found[2]
        return out

    return remembering


def stack(many: Sequence[Tensors]) -> Tensors:
    """One dict with a leading axis, from dicts of the same keys and shapes."""
    return {key: torch.stack([one[key] for one in many]) for key in many[0]}


def select(stacked: Tensors, index: int) -> Tensors:
    """One dict out of a stacked one; a copy, so that the stack can be freed."""
    return {key: value[index].clone() for key, value in stacked.items()}


def copy(tensors: Tensors) -> Tensors:
    return {key: value.detach().clone() for key, value in tensors.items()}


def full(x: Tensor) -> Tensor:
    """Rows as methods compute with them: half precision is for storing only."""
    return x.float() if x.dtype == torch.float16 else x


def count_bytes(tensors: Tensors) -> int:
    return sum([value.nbytes for value in tensors.values()])


def flat(tensors: Tensors) -> Tensor:
    """All floating-point values in one vector, by sorted key."""
    parts = [
        tensors[key].reshape(-1) for key in sorted(tensors) if tensors[key].is_floating_point()
    ]
    return torch.cat(parts) if parts else torch.zeros(0)


def difference(a: Tensors, b: Tensors) -> float:
    """The largest difference of two dicts, each key relative to its largest value (0 if empty).

    A key counts as no smaller than a hundredth of the largest: a bias whose true gradient is zero
    (of attention's keys, or before BatchNorm) holds nothing but rounding.
    """

    def largest(value: Tensor) -> float:
        return value.double().abs().max().item() if value.numel() else 0.0

    sizes = {key: max(largest(a[key]), largest(b[key])) for key in a}
    least = max(1e-2 * max(sizes.values(), default=0.0), 1e-30)
    gaps = [
        largest(a[key].double() - b[key].double()) / max(size, least) for key, size in sizes.items()
    ]
    return inf if any(isnan(gap) for gap in gaps) else max(gaps, default=0.0)
