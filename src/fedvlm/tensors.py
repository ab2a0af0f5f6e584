"""Small operations over flat dicts of tensors."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from math import inf, isnan
from threading import Lock
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Updated = tuple[Tensors, Tensors]  # what an update uploads, and the new local tensors


class _UnloadedCompiler:
    """Stands for torch._dynamo until something compiles."""

    compiled_autograd = SimpleNamespace(_disable=nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("torch._dynamo"), name)  # which then takes this place itself


_COMPILER_LOCK = Lock()
_compiler_users = 0


@contextmanager
def without_compiler() -> Iterator[None]:
    """Take gradients without importing torch's compiler, which takes seconds in every process.

    torch.func switches compiled autograd off around every gradient, and imports the compiler for that alone. Where it
    is not loaded there is nothing to switch off.
    """
    global _compiler_users
    with _COMPILER_LOCK:
        _compiler_users += 1
        if "torch._dynamo" not in sys.modules:
            vars(torch)["_dynamo"] = _UnloadedCompiler()
    try:
        yield
    finally:
        with _COMPILER_LOCK:
            _compiler_users -= 1
            if not _compiler_users and isinstance(vars(torch).get("_dynamo"), _UnloadedCompiler):
                del vars(torch)["_dynamo"]


T = TypeVar("T")
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def remember_latest(function: Callable[..., T]) -> Callable[..., T]:
    """Remembers what came of the tensors of the latest call: what all clients share is worked out
    once in a process. Told by where they are and by their version, so in-place changes are seen;
    of tensors that have neither (in vmap, or of inference) nothing is remembered.
    """
    memory: list[Any] = []

    def identify(tensor: Tensor) -> Any:
        return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def call_remembered(*arguments: Tensor) -> T:
        if any(_wrapped(tensor) or tensor.is_inference() for tensor in arguments):
            return function(*arguments)
        identities = [identify(tensor) for tensor in arguments]
        cached = memory[0] if memory else None  # taken once: another thread may put its own there
        if cached is None or cached[0] != identities:
            cached = identities, arguments, function(*arguments)  # held, so that nothing takes their place
            memory[:] = [cached]
        out: T = cached[2]
        return out

    return call_remembered


def stack(dicts: Sequence[Tensors]) -> Tensors:
    """One dict with a leading axis, from dicts of the same keys and shapes."""
    return {key: torch.stack([tensors[key] for tensors in dicts]) for key in dicts[0]}


def select(stacked: Tensors, index: int) -> Tensors:
    """One dict out of a stacked one; a copy, so that the stack can be freed."""
    return {key: value[index].clone() for key, value in stacked.items()}


def copy(tensors: Tensors) -> Tensors:
    return {key: value.detach().clone() for key, value in tensors.items()}


def to_float32(x: Tensor) -> Tensor:
    """Rows as methods compute with them: half precision is for storing only."""
    return x.float() if x.dtype == torch.float16 else x


def count_bytes(tensors: Tensors) -> int:
    return sum([value.nbytes for value in tensors.values()])


def flatten(tensors: Tensors) -> Tensor:
    """All floating-point values in one vector, by sorted key."""
    parts = [tensors[key].reshape(-1) for key in sorted(tensors) if tensors[key].is_floating_point()]
    return torch.cat(parts) if parts else torch.zeros(0)


def max_relative_difference(a: Tensors, b: Tensors) -> float:
    """The largest difference of two dicts, each key relative to its largest value (0 if empty).

    A key counts as no smaller than a hundredth of the largest: a bias whose true gradient is zero
    (of attention's keys, or before BatchNorm) holds nothing but rounding.
    """

    def largest(value: Tensor) -> float:
        return value.double().abs().max().item() if value.numel() else 0.0

    sizes = {key: max(largest(a[key]), largest(b[key])) for key in a}
    min_size = max(1e-2 * max(sizes.values(), default=0.0), 1e-30)
    gaps = [largest(a[key].double() - b[key].double()) / max(size, min_size) for key, size in sizes.items()]
    return inf if any(isnan(gap) for gap in gaps) else max(gaps, default=0.0)
