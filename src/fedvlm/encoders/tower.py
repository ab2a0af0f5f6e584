"""The image tower of an open encoder as a function of its weights, for methods that train it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call

from fedvlm.core import Tensors


class ImageTower:
    """`tower(weights, pixels)` gives (pictures, dim); `tower.weights` are those it came with."""

    def __init__(self, model: torch.nn.Module, pool: Callable[[Tensor], Tensor]) -> None:
        self._call = _Call(model, pool)
        named = self._call.named_parameters()
        skipped = ("model.text_", "model.logit_")  # of CLIP and SigLIP: not on an image's way
        self.weights: Tensors = {
            key: value.detach() for key, value in named if not key.startswith(skipped)
        }

    def __call__(self, weights: Tensors, pixels: Tensor) -> Tensor:
        pooled: Tensor = functional_call(self._call, weights, (pixels,))
        return pooled


class _Call(torch.nn.Module):
    """Makes pooling the forward pass, because functional_call swaps the weights of a forward."""

    def __init__(self, model: torch.nn.Module, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.pool = model, pool

    def forward(self, pixels: Tensor) -> Tensor:
        return self.pool(pixels)
