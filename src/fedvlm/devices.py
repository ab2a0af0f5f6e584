"""Devices for tensors: the CPU, or a GPU of NVIDIA or Apple."""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedvlm.errors import SettingsError
from fedvlm.machine import free_memory

Device = Literal["auto", "cpu", "cuda", "mps"]
Answer = TypeVar("Answer")
CPU = torch.device("cpu")
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
# of allocators that raise a plain RuntimeError: Apple's and the CPU's
OUT_OF_MEMORY_MESSAGES = ("out of memory", "can't allocate memory")


def choose_device(name: Device) -> torch.device:
    """Return the device of this name if it is available; `auto` is a GPU if there is one."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next((kind for kind, is_available in available.items() if is_available), "cpu"))
    if not available.get(name, True):
        raise SettingsError(f'device = "{name}", but torch finds no such device; set device = "cpu"')
    return torch.device(name)


def is_cpu(name: Device) -> bool:
    """Tell whether the device of this name is the CPU, as `auto` is without a GPU."""
    return name == "cpu" or (name == "auto" and choose_device(name) == CPU)


def to_device(value: Any, device: torch.device) -> Any:
    """Move tensors, and containers of tensors, to a device."""
    if isinstance(value, Tensor) and value.ndim and value.stride(0) == 0 and len(value) > 1:
        return value[0].to(device).expand(value.shape)  # the same for all clients, stored once
    if isinstance(value, Tensor) or hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(part, device) for key, part in value.items()}
    if isinstance(value, tuple):
        moved_parts = [to_device(part, device) for part in value]
        return type(value)(*moved_parts) if hasattr(value, "_fields") else tuple(moved_parts)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: to_device(getattr(value, part.name), device) for part in fields(value)}
        return replace(value, **parts)
    return DeviceRows(value, device) if hasattr(value, "take") and device != CPU else value


class DeviceRows:
    """Samples that are read one minibatch at a time, and move to a device when they are read."""

    def __init__(self, rows: Any, device: torch.device) -> None:
        self.rows, self.device = rows, device

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.rows.shape)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Tensor:
        rows: Tensor = self.rows[to_device(index, CPU)]
        return rows.to(self.device)

    def take(self, index: Any) -> "DeviceRows":
        return DeviceRows(self.rows.take(to_device(index, CPU)), self.device)


def set_deterministic() -> None:
    """Make results repeatable on one machine: no algorithm that sums in a random order."""
    os.environ.setdefault(CUBLAS_VARIABLE, ":4096:8")  # otherwise cuBLAS is not repeatable
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return what a record says of a device, with the flags as they are."""
    if device.type == "cpu":
        return {"device": "cpu"}
    return {
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "TF32": torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32,
        CUBLAS_VARIABLE: os.environ.get(CUBLAS_VARIABLE, ""),
    }


def free_device_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device's memory; None if unknown."""
    if device.type == "cuda":  # memory that torch has reserved and does not use is free too
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + idle)
    if device.type == "mps":
        limit = torch.mps.recommended_max_memory()
        return max(0, int(limit - torch.mps.current_allocated_memory()))
    return free_memory()


def is_out_of_memory(error: Exception) -> bool:
    has_message = isinstance(error, RuntimeError) and any(message in str(error) for message in OUT_OF_MEMORY_MESSAGES)
    return has_message or isinstance(error, torch.OutOfMemoryError)


def run_in_halves(work: Callable[[Tensor], Answer], rows: Tensor) -> list[Answer]:
    """Run on all rows at once, or on halves of them if memory is short."""
    try:
        return [work(rows)]
    except RuntimeError as error:
        if not is_out_of_memory(error) or len(rows) < 2:
            raise
    # here the memory of the failed attempt is free again
    middle = len(rows) // 2
    return run_in_halves(work, rows[:middle]) + run_in_halves(work, rows[middle:])
