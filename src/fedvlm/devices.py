"""Where tensors are worked on: the CPU, or a GPU of NVIDIA or Apple."""

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
# what allocators say that raise a plain RuntimeError: Apple's, and the CPU's
OUT_OF_MEMORY_MESSAGES = ("out of memory", "can't allocate memory")


def choose_device(name: Device) -> torch.device:
    """The device of this name, if it is here; `auto` takes a GPU where there is one."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next((kind for kind, is_available in available.items() if is_available), "cpu"))
    if not available.get(name, True):
        raise SettingsError(f'device = "{name}", but torch finds none here; set device = "cpu"')
    return torch.device(name)


def is_cpu(name: Device) -> bool:
    """Whether the device of this name is the CPU, as `auto` is where there is no other."""
    return name == "cpu" or (name == "auto" and choose_device(name) == CPU)


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors, and what is made of them, on a device."""
    if isinstance(value, Tensor) and value.ndim and value.stride(0) == 0 and len(value) > 1:
        return value[0].to(device).expand(value.shape)  # what all clients were sent, held once
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
    """Rows that are read one minibatch at a time, and go to a device as they are asked for."""

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
    """One machine gives one result: no algorithm that sums in another order every time."""
    os.environ.setdefault(CUBLAS_VARIABLE, ":4096:8")  # else cuBLAS is not repeatable
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def describe_device(device: torch.device) -> dict[str, Any]:
    """What a record tells of a device, with the flags as they are."""
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
    """Bytes of a device's memory that can still be taken; None where nobody says."""
    if device.type == "cuda":  # what torch holds and does not use is free too
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
    """The work on all rows at once, or on halves of them where memory does not do for that."""
    try:
        return [work(rows)]
    except RuntimeError as error:
        if not is_out_of_memory(error) or len(rows) < 2:
            raise
    # out here what the failed attempt held is free again
    middle = len(rows) // 2
    return run_in_halves(work, rows[:middle]) + run_in_halves(work, rows[middle:])
