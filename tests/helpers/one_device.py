"""A mode in which no operation takes tensors, or random numbers, of two devices."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """Meta alone lets some pass, matmul and indexing among them."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        arguments = tree_leaves((args, kwargs or {}))
        device_types = {leaf.device.type for leaf in arguments if isinstance(leaf, torch.Tensor)}
        assert len(device_types) <= 1, f"{operation} mixes {sorted(device_types)}"
        made = operation(*args, **(kwargs or {}))
        drawn = {leaf.device.type for leaf in arguments if isinstance(leaf, torch.Generator)}
        if drawn and isinstance(made, torch.Tensor):
            assert drawn == {made.device.type}, f"{operation} draws on {drawn}, gives {made.device}"
        return made
