"""Small networks over flat tensors: linear layers, BatchNorms and activations, and CLIP's contrastive loss.

The tensors of a layer are named by the network and the layer's position: `mask0.weight`, `mask1.mean`. BatchNorm is our
own because padding must not count and because it has to pass through torch.func. `forward` and `backward` do the same
for stacked clients with gradients written out, which is several times faster than autograd.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import cross_entropy, leaky_relu

from fedvlm.core import Tensors

BATCH_NORM_EPSILON = 1e-5  # added to a variance
BATCH_NORM_MOMENTUM = 0.1  # weight of a minibatch in the running statistics
MASKED_LOGIT = -1e9  # ignored by a softmax, yet finite, so that no gradient is NaN
NEGATIVE_SLOPES = {"leaky": 0.01, "relu": 0.0}  # of an activation below 0
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"leaky": F.leaky_relu, "relu": F.relu, "tanh": torch.tanh}
Layers = tuple[str, ...]  # of "linear", "norm", "leaky", "relu" and "tanh"
SavedTensors = tuple[Tensor, ...]  # what the gradient of a layer needs of its forward pass


def reverse_gradient(x: Tensor) -> Tensor:
    """Return x, with the opposite gradient."""
    return 2 * x.detach() - x


class Statistics(NamedTuple):
    """The running statistics of a BatchNorm."""

    mean: Tensor  # (width,)
    variance: Tensor  # (width,)


def normalise(x: Tensor, weight: Tensor, bias: Tensor, by: Statistics) -> Tensor:
    """Apply BatchNorm with given statistics; a sample's result depends on no other sample."""
    return (x - by.mean) * (torch.rsqrt(by.variance + BATCH_NORM_EPSILON) * weight) + bias


def batch_norm(x: Tensor, real: Tensor, weight: Tensor, bias: Tensor, running: Statistics) -> tuple[Tensor, Statistics]:
    """Apply BatchNorm to a minibatch without its padding; return the new running statistics too.

    A single real sample has no variance: it is normalised by the running statistics, which do not change.
    """
    weights = real.to(x.dtype)
    count = weights.sum()
    has_variance, n_real = count > 1, count.clamp(min=1)
    sample_weights = weights / n_real
    mean = torch.where(has_variance, sample_weights @ x, running.mean)
    centred = x - mean
    variance = torch.where(has_variance, sample_weights @ centred.square(), running.variance)
    out = centred * (torch.rsqrt(variance + BATCH_NORM_EPSILON) * weight) + bias
    unbiased = variance.detach() * (n_real / (count - 1).clamp(min=1))
    # With a single sample both ends of the interpolation are equal.
    pairs = (running.mean, mean.detach()), (running.variance, unbiased)
    new = Statistics(*(torch.lerp(*pair, BATCH_NORM_MOMENTUM) for pair in pairs))
    return out, new


def initial_parameters(layers: Layers, name: str, widths: Sequence[int], draw: torch.Generator) -> Tensors:
    """Return initial tensors; `widths` are the inputs of each linear layer and the output.

    Weights and biases are uniform within ±1/√inputs, as PyTorch initialises them.
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
    """Return the names of all running statistics that networks of these names may have."""
    return frozenset(f"{name}{place}.{part}" for name in names for place in range(8) for part in ("mean", "variance"))


def apply_layers(
    layers: Layers, name: str, parameters: Tensors, x: Tensor, real: Tensor | None = None
) -> tuple[Tensor, Tensors]:
    """Return the output and the new running statistics.

    With `real`, BatchNorm uses the minibatch; without it, the running statistics, as in evaluation.
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
                # BatchNorm removes the bias: its gradient is rounding error, which Adam would scale up to full steps.
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


class StackedNetwork(NamedTuple):
    """A network of stacked clients: every tensor has a leading axis of clients, and there is no tanh."""

    layers: Layers
    name: str
    parameters: Tensors


class BatchNormWeights(NamedTuple):
    """The weights of samples in BatchNorm's statistics."""

    samples: Tensor  # (clients, samples): 1 / count where a sample is real
    has_variance: Tensor  # (clients, 1, 1): whether there are two real samples
    unbiased: Tensor  # (clients, 1, 1): count / (count - 1)


def batch_norm_weights(real: Tensor, dtype: torch.dtype) -> BatchNormWeights:
    """Return the weights of real samples (clients, samples)."""
    count = real.sum(1)
    n_real = count.clamp(min=1).to(dtype)[:, None]
    unbiased = n_real / (count[:, None] - 1).clamp(min=1)
    return BatchNormWeights(real / n_real, (count > 1)[:, None, None], unbiased[..., None])


def forward(
    network: StackedNetwork, x: Tensor, norm_weights: BatchNormWeights
) -> tuple[Tensor, list[SavedTensors], Tensors]:
    """Return the output, what `backward` needs, and the new running statistics."""
    layers, name, parameters = network
    saved: list[SavedTensors] = []
    new: Tensors = {}
    for place, layer in enumerate(layers):
        prefix = f"{name}{place}"
        if layer in NEGATIVE_SLOPES:
            x = leaky_relu(x, NEGATIVE_SLOPES[layer])
            saved.append((x,))
            continue
        weight, bias = parameters[f"{prefix}.weight"], parameters[f"{prefix}.bias"][:, None]
        if layer == "linear":
            saved.append((x,))
            if weight.shape[1] == 1:  # a product of one column rounds differently for one client
                x = (x * weight).sum(2, keepdim=True) + bias
            else:
                x = torch.baddbmm(bias, x, weight.mT)
            continue
        old = parameters[f"{prefix}.mean"][:, None], parameters[f"{prefix}.variance"][:, None]
        sample_weights = norm_weights.samples[:, None]
        mean = torch.where(norm_weights.has_variance, torch.bmm(sample_weights, x), old[0])
        normalised = x - mean
        variance = torch.where(norm_weights.has_variance, torch.bmm(sample_weights, normalised.square()), old[1])
        scale = torch.rsqrt(variance + BATCH_NORM_EPSILON)
        saved.append((normalised.mul_(scale), scale))
        x = torch.addcmul(bias, normalised, weight[:, None])
        # With a single sample both ends of the interpolation are equal.
        new[f"{prefix}.mean"] = torch.lerp(old[0], mean, BATCH_NORM_MOMENTUM)[:, 0]
        new[f"{prefix}.variance"] = torch.lerp(old[1], variance * norm_weights.unbiased, BATCH_NORM_MOMENTUM)[:, 0]
    return x, saved, new


def backward(
    network: StackedNetwork,
    saved: Sequence[SavedTensors],
    gradient: Tensor,
    norm_weights: BatchNormWeights,
    gradients: Tensors,
    needs_input_gradient: bool = True,
) -> Tensor:
    """Write the gradients of a network into `gradients`, given that of its output.

    Returns the gradient of the input, if that is needed. A bias before BatchNorm has none: its entry is not written.
    """
    layers, name, parameters = network
    sample_weights = norm_weights.samples[..., None] * norm_weights.has_variance
    for place in reversed(range(len(layers))):
        layer, prefix = layers[place], f"{name}{place}"
        if layer in NEGATIVE_SLOPES:
            (out,) = saved[place]
            gradient = torch.ops.aten.leaky_relu_backward(gradient, out, NEGATIVE_SLOPES[layer], True)
            continue
        weight = parameters[f"{prefix}.weight"]
        if layer == "norm":
            normalised, scale = saved[place]
            shift, stretch = gradient.sum(1, keepdim=True), (gradient * normalised).sum(1, keepdim=True)
            gradients[f"{prefix}.bias"].copy_(shift[:, 0])
            gradients[f"{prefix}.weight"].copy_(stretch[:, 0])
            common = torch.addcmul(shift, normalised, stretch)
            gradient = torch.addcmul(gradient, common, sample_weights, value=-1).mul_(scale * weight[:, None])
            continue
        torch.bmm(gradient.mT, saved[place][0], out=gradients[f"{prefix}.weight"])
        if layers[place + 1 : place + 2] != ("norm",):
            torch.sum(gradient, 1, out=gradients[f"{prefix}.bias"])
        if place or needs_input_gradient:
            gradient = torch.bmm(gradient, weight)
    return gradient


def contrastive_loss(
    x: Tensor, text: Tensor, y: Tensor, real: Tensor, scale: float, mask_duplicates: bool = False
) -> Tensor:
    """Return CLIP's loss: the mean over real samples of the cross-entropies of both directions.

    x (samples, dim) unit-norm features, text (classes, dim). A sample is paired with the text of its class. Two samples
    of one class are false negatives of each other, so that the loss has a floor; `mask_duplicates` leaves them out.
    """
    logits = scale * x @ text[y].mT
    out = ~real[None, :]
    if mask_duplicates:
        is_self = torch.eye(len(y), dtype=torch.bool)
        out = out | ((y[:, None] == y[None, :]) & ~is_self)
    target = torch.arange(len(y))
    image_to_text = cross_entropy(logits.masked_fill(out, MASKED_LOGIT), target, reduction="none")
    text_to_image = cross_entropy(logits.mT.masked_fill(out, MASKED_LOGIT), target, reduction="none")
    losses = torch.where(real, image_to_text + text_to_image, 0.0)
    return losses.sum() / (2 * real.sum().clamp(min=1))
