"""Where tensors are worked on: the CPU, or a GPU of NVIDIA or Apple."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedvlm.errors import SettingsError

Device = Literal["auto", "cpu", "cuda", "mps"]


def choose(name: Device) -> torch.device:
    """The device of this name, if it is here; `auto` takes a GPU where there is one."""
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next((one for one, there in here.items() if there), "cpu"))
    if not here.get(name, True):
        raise SettingsError(f'device = "{name}", but torch finds none here; set device = "cpu"')
    return torch.device(name)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, and what is made of them, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(one, device) for key, one in value.items()}
    if isinstance(value, tuple):
        every = [moved(one, device) for one in value]
        return type(value)(*every) if hasattr(value, "_fields") else tuple(every)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: moved(getattr(value, one.name), device) for one in fields(value)}
        return replace(value, **parts)
    return value
