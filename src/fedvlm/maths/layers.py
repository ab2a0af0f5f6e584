"""Small networks over flat tensors: stacks of linear layers, BatchNorms and activations.

The tensors of the layer at a place of a stack are called by the stack's name and the place:
`mask0.weight`, `mask1.mean`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core import Tensors
from fedvlm.maths.reversal import Statistics, batch_norm, normalise

Layers = tuple[str, ...]  # of "linear", "norm", "leaky", "relu" and "tanh"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky": F.leaky_relu,
    "relu": F.relu,
    "tanh": torch.tanh,
}  # leaky: slope 0.01


def initial_parameters(layers: Layers, name: str, widths: Sequence[int], draw: torch.Generator) -> Tensors:
    """The tensors a stack starts from; `widths` are the inputs of each linear layer and the end.

    Weights and biases are uniform within ±1/√inputs, PyTorch's own first values.
    """
    out: Tensors = {}
    remaining_widths = list(widths)
    width = remaining_widths[0]
    for place, layer in enumerate(layers):
        prefix = f"{name}{place}"
        if layer == "linear":
            inputs, width = remaining_widths.pop(0), remaining_widths[0]
            bound = inputs**-0.5
            for part, shape in (("weight", (width, inputs)), ("bias", (width,))):
                drawn = torch.rand(shape, generator=draw)
                out[f"{prefix}.{part}"] = bound * (2 * drawn - 1)
        elif layer == "norm":
            for part in ("weight", "variance"):
                out[f"{prefix}.{part}"] = torch.ones(width)
            for part in ("bias", "mean"):
                out[f"{prefix}.{part}"] = torch.zeros(width)
    return out


def running_statistics_keys(*names: str) -> frozenset[str]:
    """What stacks of these names remember but do not train, however many layers they have."""
    return frozenset(f"{name}{place}.{part}" for name in names for place in range(8) for part in ("mean", "variance"))


def apply_layers(
    layers: Layers, name: str, parameters: Tensors, x: Tensor, real: Tensor | None = None
) -> tuple[Tensor, Tensors]:
    """The output of a stack; with `real`, BatchNorm goes by the minibatch and tells its statistics.

    Without it BatchNorm goes by the running statistics, as it does for rows that are classified.
    """
    new: Tensors = {}
    for place, layer in enumerate(layers):
        prefix = f"{name}{place}"
        if layer in ACTIVATIONS:
            x = ACTIVATIONS[layer](x)
            continue
        weight, bias = parameters[f"{prefix}.weight"], parameters[f"{prefix}.bias"]
        if layer == "linear":
            if layers[place + 1 : place + 2] == ("norm",):
                # BatchNorm takes the bias out again: what is left of its gradient is rounding,
                # which Adam would blow up to whole steps.
                bias = bias.detach()
            x = F.linear(x, weight, bias)
            continue
        running = Statistics(parameters[f"{prefix}.mean"], parameters[f"{prefix}.variance"])
        if real is None:
            x = normalise(x, weight, bias, running)
        else:
            x, now = batch_norm(x, real, weight, bias, running)
            new |= {f"{prefix}.mean": now.mean, f"{prefix}.variance": now.variance}
    return x, new
