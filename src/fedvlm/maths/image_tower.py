"""The image tower of an open encoder as a function of its weights, for methods that train it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedvlm.core import Tensors
from fedvlm.errors import EncoderError, SettingsError, unknown_name

NON_IMAGE_PREFIXES = ("model.text_", "model.logit_", "model.embeddings.mask_token")  # not on an image's way
# The matrices of a block by what they do, and how the models call them.
TARGETS = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "out": ("out_proj", "o_proj"),
    "up": ("fc1", "weights_in"),
    "down": ("fc2", "weights_out"),
}


class ImageTower:
    """`tower(weights, pixels)` gives (images, dim); `tower.weights` are those it came with.

    Weights that are left out are the encoder's own, so a method carries only what it trains.
    """

    def __init__(self, model: torch.nn.Module, pool: Callable[[Tensor], Tensor]) -> None:
        name, layers = _layers(model)
        self._call = _Call(model, pool, layers)
        self._block_prefix = f"model.{name}."  # of keys of the transformer blocks
        self.blocks = len(layers)
        self.weights: Tensors = {
            key: value.detach()
            for key, value in self._call.named_parameters()
            if not key.startswith(NON_IMAGE_PREFIXES)
        }
        self._device_tensors: Tensors = {}  # weights and buffers of an image's way, if not the model's own
        self.width: int = self.weights[self.matrices(["q"])[0]].shape[1]  # of a token

    def __call__(self, weights: Tensors, pixels: Tensor, prompts: Tensor | None = None) -> Tensor:
        """`prompts` (depth, count, width) are tokens more: fresh ones in each of the first blocks.

        They are gone before pooling, so that a class token or a pooling head sees what it knows.
        """
        pooled: Tensor = functional_call(self._call, {**self._device_tensors, **weights}, (pixels, prompts))
        return pooled

    def to(self, device: torch.device) -> "ImageTower":
        """The same tower on a device; the model itself stays where it is."""
        tower = copy(self)
        tower.weights = {key: value.to(device) for key, value in self.weights.items()}
        buffers = {key: value.to(device) for key, value in self._call.named_buffers()}
        tower._device_tensors = {**buffers, **tower.weights}
        return tower

    def last(self, blocks: int) -> list[str]:
        """Weights from the last blocks on to the embedding; 0 blocks stand for the whole tower."""
        if not 0 <= blocks <= self.blocks:
            raise SettingsError(f"blocks = {blocks}; the image tower has {self.blocks} (0 stands for all of it)")
        keys = list(self.weights)
        if blocks == 0:
            return keys
        first = f"{self._block_prefix}{self.blocks - blocks}."
        return keys[next(i for i, key in enumerate(keys) if key.startswith(first)) :]

    def matrices(self, targets: Sequence[str]) -> list[str]:
        """Keys of the named weight matrices of all blocks, in the order of the tower."""
        for target in targets:
            if target not in TARGETS:
                raise unknown_name("target", target, TARGETS)
        ends = tuple(f".{name}.weight" for target in targets for name in TARGETS[target])
        inside = [key for key in self.weights if key.startswith(self._block_prefix)]
        return [key for key in inside if key.endswith(ends)]


def _layers(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """The list of transformer blocks an image goes through, and its name."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not f"model.{name}".startswith(NON_IMAGE_PREFIXES):
            return name, module
    raise EncoderError(f"{type(model).__name__} has no list of transformer blocks to train")


class _Call(torch.nn.Module):
    """Makes pooling the forward pass, because functional_call swaps the weights of a forward."""

    def __init__(self, model: torch.nn.Module, pool: Callable[[Tensor], Tensor], layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.model, self.pool = model, pool
        self.layers = list(layers)  # a plain list, so that weights do not go by two names

    def forward(self, pixels: Tensor, prompts: Tensor | None) -> Tensor:
        if prompts is None or prompts.shape[1] == 0:
            return self.pool(pixels)
        with insert_prompts(self.layers, prompts):
            return self.pool(pixels)


@contextmanager
def insert_prompts(layers: Sequence[torch.nn.Module], prompts: Tensor) -> Iterator[None]:
    """Prompts behind the other tokens: attention knows no order but that of positions."""
    depth, count, _ = prompts.shape
    if depth > len(layers):
        raise SettingsError(f"depth = {depth}; the image tower has {len(layers)} blocks")

    def add_prompts(index: int) -> Callable[[Any, Any], Any]:
        def hook(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            tokens = inputs[0][:, :-count] if index else inputs[0]
            block_prompts = prompts[index].expand(len(tokens), -1, -1)
            return (torch.cat([tokens, block_prompts], dim=1), *inputs[1:])

        return hook

    def drop_prompts(layer: torch.nn.Module, inputs: Any, tokens: Tensor) -> Tensor:
        return tokens[:, :-count]

    with ExitStack() as hooks:
        for index in range(depth):
            hook = layers[index].register_forward_pre_hook(add_prompts(index))
            hooks.callback(hook.remove)
        hooks.callback(layers[-1].register_forward_hook(drop_prompts).remove)
        yield
