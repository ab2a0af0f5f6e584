"""A method whose work is done on a GPU, while engines, channel and files keep to the CPU.

Rows and tensors go there for a verb and what comes of it comes back, so nothing else has to know.
No GPU was at hand when this was written: tests show on the meta device that no verb mixes devices.
"""

from collections.abc import Callable
from typing import Any

import torch

from fedvlm.core import Frozen, Method, stacked
from fedvlm.devices import CPU, Device, choose, moved, repeatable
from fedvlm.parts import nothing


def on(method: Method, name: Device) -> Method:
    """The method as it is on the CPU, or placed on a GPU."""
    device = choose(name)
    return method if device.type == "cpu" else placed(method, device)


def placed(method: Method, device: torch.device) -> Method:
    """The method with update, update_many, predict and adapt on the device."""
    repeatable()
    plain: dict[str, Callable[..., Any]] = {"update": method.update, "predict": method.predict}
    if (fast := stacked(method)) is not None:
        plain["update_many"] = fast.update_many
    if type(method).adapt is not nothing:
        plain["adapt"] = method.adapt
    last: list[Frozen] = []  # as it came and as it is on the device, of the latest call
    verbs: dict[str, Any] = {name: _verb(verb, device, last) for name, verb in plain.items()}
    verbs["__reduce__"] = lambda self: (placed, (method, device))  # to worker processes
    kind = type(type(method).__name__, (type(method),), verbs)
    other: Method = object.__new__(kind)
    other.__dict__.update(vars(method))
    return other


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
