"""Call the image tower of an open encoder as a function of its weights, for methods that train it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedvlm.core import Tensors
from fedvlm.core.schema import Range, check_range
from fedvlm.errors import EncoderError, SettingsError, unknown_name

NON_IMAGE_PREFIXES = ("model.text_", "model.logit_", "model.embeddings.mask_token")  # not used for images
# The matrices of a block by function, and their names in the models.
TARGETS: dict[str, tuple[str, ...]] = {"q": ("q_proj",), "k": ("k_proj",), "v": ("v_proj",)}
TARGETS |= {"out": ("out_proj", "o_proj"), "up": ("fc1", "weights_in"), "down": ("fc2", "weights_out")}


class ImageTower:
    """Compute `tower(weights, pixels)` (images, dim); `tower.weights` are the encoder's.

    Weights that are left out are the encoder's, so that a method has only those it trains.
    """

    def __init__(self, model: torch.nn.Module, pool: Callable[[Tensor], Tensor]) -> None:
        name, layers = _layers(model)
        self._call = _Call(model, pool, layers)
        self._block_prefix = f"model.{name}."  # of the keys of transformer blocks
        self.blocks = len(layers)
        parameters = dict(self._call.named_parameters())
        self.weights: Tensors = {k: v.detach() for k, v in parameters.items() if not k.startswith(NON_IMAGE_PREFIXES)}
        self._device_tensors: Tensors = {}  # weights and buffers on another device than the model's
        self.width: int = self.weights[self.matrices(["q"])[0]].shape[1]  # of a token

    def __call__(self, weights: Tensors, pixels: Tensor, prompts: Tensor | None = None) -> Tensor:
        """Embed images; `prompts` (depth, count, width) are extra tokens, new ones in each of the first blocks.

        They are removed before pooling, so that a class token or a pooling head sees its usual tokens.
        """
        pooled: Tensor = functional_call(self._call, {**self._device_tensors, **weights}, (pixels, prompts))
        return pooled

    def to(self, device: torch.device) -> "ImageTower":
        """Return the tower on a device; the model itself is not moved."""
        tower = copy(self)
        tower.weights = {key: value.to(device) for key, value in self.weights.items()}
        buffers = {key: value.to(device) for key, value in self._call.named_buffers()}
        tower._device_tensors = {**buffers, **tower.weights}
        return tower

    def last(self, blocks: int) -> list[str]:
        """Return the keys of the weights from the last blocks on; 0 stands for the whole tower."""
        check_range("blocks", blocks, Range(0, self.blocks))
        keys = list(self.weights)
        if blocks == 0:
            return keys
        first = f"{self._block_prefix}{self.blocks - blocks}."
        return keys[next(i for i, key in enumerate(keys) if key.startswith(first)) :]

    def matrices(self, targets: Sequence[str]) -> list[str]:
        """Return the keys of the named weight matrices of all blocks, in the order of the tower."""
        for target in targets:
            if target not in TARGETS:
                raise unknown_name("target", target, TARGETS)
        ends = tuple(f".{name}.weight" for target in targets for name in TARGETS[target])
        inside = [key for key in self.weights if key.startswith(self._block_prefix)]
        return [key for key in inside if key.endswith(ends)]


def _layers(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """Return the list of transformer blocks of the image tower, and its name."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not f"model.{name}".startswith(NON_IMAGE_PREFIXES):
            return name, module
    raise EncoderError(f"{type(model).__name__} has no list of transformer blocks to train")


class _Call(torch.nn.Module):
    """Make pooling the forward pass, because functional_call replaces the weights of a forward pass."""

    def __init__(self, model: torch.nn.Module, pool: Callable[[Tensor], Tensor], layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.model, self.pool = model, pool
        self.layers = list(layers)  # a plain list, so that weights do not have two names

    def forward(self, pixels: Tensor, prompts: Tensor | None) -> Tensor:
        if prompts is None or prompts.shape[1] == 0:
            return self.pool(pixels)
        with insert_prompts(self.layers, prompts):
            return self.pool(pixels)


@contextmanager
def insert_prompts(layers: Sequence[torch.nn.Module], prompts: Tensor) -> Iterator[None]:
    """Insert prompts behind the other tokens: attention depends on no order but positions."""
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
