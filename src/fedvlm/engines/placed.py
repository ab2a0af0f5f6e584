"""A method whose work is done on a GPU, while engines, channel and files keep to the CPU.

Tensors go there for a verb and what comes of it comes back, so nothing else has to know; rows stay
there where they fit.
No GPU was at hand when this was written: tests show on the meta device that no verb mixes devices.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedvlm.core import Frozen, Method, stacked
from fedvlm.devices import CPU, Device, choose, free, moved, repeatable
from fedvlm.engines.client import World
from fedvlm.parts.bodies import adapts

RESIDENT = "resident"  # where a world remembers itself with its rows on a device
SHARE = 4  # the part of a device's free memory for the rows of all, and for those of a chunk


def on(method: Method, name: Device) -> Method:
    """The method as it is on the CPU, or placed on a GPU."""
    device = choose(name)
    return method if device.type == "cpu" else placed(method, device)


class Away:
    """What a placed method is besides."""

    place: torch.device


def placed(method: Method, device: torch.device) -> Method:
    """The method with update, update_many, predict and adapt on the device."""
    repeatable()
    plain: dict[str, Callable[..., Any]] = {"update": method.update, "predict": method.predict}
    if (fast := stacked(method)) is not None:
        plain["update_many"] = fast.update_many
    if adapts(method):
        plain["adapt"] = method.adapt
    last: list[Frozen] = []  # as it came and as it is on the device, of the latest call
    verbs: dict[str, Any] = {name: _verb(verb, device, last) for name, verb in plain.items()}
    verbs["place"] = device
    verbs["__reduce__"] = lambda self: (placed, (method, device))  # to worker processes
    kind = type(type(method).__name__, (type(method), Away), verbs)
    other: Method = object.__new__(kind)
    other.__dict__.update(vars(method))
    return other


def place_of(method: Method) -> torch.device:
    """Where a method's verbs are worked out."""
    return method.place if isinstance(method, Away) else CPU


def resident(world: World) -> World:
    """With its rows on the method's device for all rounds, where they take little of its memory.

    They go there once, and are gone with the world.
    """
    device, x = place_of(world.method), world.x
    if device.type == "cpu" or not isinstance(x, Tensor) or x.device == device:
        return world
    if RESIDENT not in vars(world):
        room = free(device)
        if room is None or x.nbytes > room // SHARE:
            return world
        vars(world)[RESIDENT] = replace(world, x=x.to(device))
    there: World = vars(world)[RESIDENT]
    return there


def larger(device: torch.device, size: int) -> int:
    """How often what suits a core's cache fits into a device's free memory, as a power of two.

    A CPU gains nothing from more than once.
    """
    room = None if device.type == "cpu" else free(device)
    return 1 if room is None else 1 << max(0, (room // SHARE // size).bit_length() - 1)


def _verb(
    plain: Callable[..., Any], device: torch.device, last: list[Frozen]
) -> Callable[..., Any]:
    def verb(self: Method, frozen: Frozen, *rest: Any) -> Any:
        if not last or last[0] is not frozen:
            last[:] = [frozen, moved(frozen, device)]
        return moved(away(plain, device, last[1], *rest), CPU)

    return verb


def away(plain: Callable[..., Any], device: torch.device, frozen: Frozen, *rest: Any) -> Any:
    """What a verb gives on the device, also for tensors that it makes itself."""
    with device:
        return plain(frozen, *(moved(one, device) for one in rest))
