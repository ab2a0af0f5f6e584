"""Run a method's verbs on a GPU, while engines, channel and files stay on the CPU.

Tensors go there for a verb and what comes of it comes back, so nothing else has to know; rows stay
there where they fit.
No GPU was at hand when this was written: tests show on the meta device that no verb mixes devices.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedvlm.core import Frozen, Method, as_stacked
from fedvlm.devices import CPU, Device, choose_device, free_device_memory, set_deterministic, to_device
from fedvlm.engines.client import World
from fedvlm.parts.bodies import adapts

RESIDENT_ATTRIBUTE = "resident"  # under which a world stores its copy with samples on a device
FREE_MEMORY_DIVISOR = 4  # samples of all, and of a chunk, may take this part of a device's free memory


def with_device(method: Method, name: Device) -> Method:
    """Return the method itself for the CPU, or placed on a GPU."""
    device = choose_device(name)
    return method if device.type == "cpu" else place_method(method, device)


class DeviceMethod:
    """The mixin of a method that is placed on a device."""

    place: torch.device


def place_method(method: Method, device: torch.device) -> Method:
    """Return the method with update, update_many, predict and adapt on the device."""
    set_deterministic()
    cpu_verbs: dict[str, Callable[..., Any]] = {"update": method.update, "predict": method.predict}
    if (stacked_method := as_stacked(method)) is not None:
        cpu_verbs["update_many"] = stacked_method.update_many
    if adapts(method):
        cpu_verbs["adapt"] = method.adapt
    last: list[Frozen] = []  # of the latest call: as given, and on the device
    verbs: dict[str, Any] = {name: _device_verb(verb, device, last) for name, verb in cpu_verbs.items()}
    verbs["place"] = device
    verbs["__reduce__"] = lambda self: (place_method, (method, device))  # to worker processes
    kind = type(type(method).__name__, (type(method), DeviceMethod), verbs)
    on_device: Method = object.__new__(kind)
    on_device.__dict__.update(vars(method))
    return on_device


def device_of(method: Method) -> torch.device:
    return method.place if isinstance(method, DeviceMethod) else CPU


def with_resident_rows(world: World) -> World:
    """Return the world with its samples on the method's device, once, if they take little of its memory."""
    device, x = device_of(world.method), world.x
    if device.type == "cpu" or not isinstance(x, Tensor) or x.device == device:
        return world
    if RESIDENT_ATTRIBUTE not in vars(world):
        free_bytes = free_device_memory(device)
        if free_bytes is None or x.nbytes > free_bytes // FREE_MEMORY_DIVISOR:
            return world
        vars(world)[RESIDENT_ATTRIBUTE] = replace(world, x=x.to(device))
    resident_world: World = vars(world)[RESIDENT_ATTRIBUTE]
    return resident_world


def chunk_factor(device: torch.device, size: int) -> int:
    """Return how often a chunk for a core's cache fits into a GPU's free memory, as a power of two; 1 for a CPU."""
    free_bytes = None if device.type == "cpu" else free_device_memory(device)
    return 1 if free_bytes is None else 1 << max(0, (free_bytes // FREE_MEMORY_DIVISOR // size).bit_length() - 1)


def _device_verb(cpu_verb: Callable[..., Any], device: torch.device, last: list[Frozen]) -> Callable[..., Any]:
    def verb(self: Method, frozen: Frozen, *rest: Any) -> Any:
        if not last or last[0] is not frozen:
            last[:] = [frozen, to_device(frozen, device)]
        return to_device(run_on_device(cpu_verb, device, last[1], *rest), CPU)

    return verb


def run_on_device(cpu_verb: Callable[..., Any], device: torch.device, frozen: Frozen, *rest: Any) -> Any:
    """Run a verb on the device, also for tensors that it makes itself."""
    with device:
        return cpu_verb(frozen, *(to_device(argument, device) for argument in rest))
