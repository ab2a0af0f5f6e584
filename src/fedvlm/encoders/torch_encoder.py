"""Where an encoder of torch computes: the CPU in float32, or a GPU in float16."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedvlm.devices import Device, choose_device, free_device_memory, is_out_of_memory, run_in_halves, set_deterministic
from fedvlm.encoders import BATCH, Vectors
from fedvlm.errors import EncoderError

MAX_GPU_BATCH = 256  # images at once on a GPU: also what a kill can cost
TENSORS_PER_IMAGE = 8  # times its largest tensor that an image takes on its way


class TorchEncoder:
    """The verbs of an encoder over `_vectors`, which knows nothing of memory and precision."""

    name: str

    def __init__(self, device: Device) -> None:
        self.device = choose_device(device)
        self.half = self.device.type != "cpu"  # on a GPU images and sentences go in float16
        if self.half:
            set_deterministic()

    @property
    def dtype(self) -> str:
        return "float16" if self.half else "float32"

    def halved(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.float16, enabled=self.half)

    def _vectors(self, pixels: Tensor, patches: bool) -> tuple[Tensor, Tensor | None]:
        """Pooled embeddings, and those of patches if they are asked for."""
        raise NotImplementedError

    def embed(self, batch: Sequence[NDArray[Any]] | Sequence[bytes], patches: bool) -> Vectors:
        pixels = torch.from_numpy(np.stack([np.asarray(array, np.float32) for array in batch]))
        try:
            parts = run_in_halves(lambda some: self._embed(some, patches), pixels)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise EncoderError(
                f"{self.name} finds no memory for one image on {self.device} ({error}); "
                'close what else uses it, or set access.device = "cpu"'
            ) from error
        grids = [grid for _, grid in parts if grid is not None]
        pooled = np.concatenate([array for array, _ in parts])
        return Vectors(pooled, np.concatenate(grids) if grids else None)

    @torch.inference_mode()
    def _embed(self, pixels: Tensor, patches: bool) -> tuple[NDArray[np.float32], NDArray[np.float16] | None]:
        with self.halved():
            pooled, grid = self._vectors(pixels.to(self.device), patches)
        places = None if grid is None else grid.to(torch.float16).cpu().numpy()
        return pooled.float().cpu().numpy(), places

    @cached_property
    def _bytes_per_image(self) -> int:
        """Bytes an image takes on its way, roughly."""
        side = self._side()
        largest = _LargestTensor()  # type: ignore[no-untyped-call]
        with torch.inference_mode(), self.halved(), largest:
            self._vectors(torch.zeros(1, 3, *side, device=self.device), True)
        return TENSORS_PER_IMAGE * int(largest.bytes)

    def _side(self) -> tuple[int, int]:
        """Height and width of an image as the encoder takes it."""
        raise NotImplementedError

    @property
    def batch(self) -> int:
        """Images to be given at once.

        On a CPU rounding follows the size of a batch, so it is always the same there.
        """
        room = None if self.device.type == "cpu" else free_device_memory(self.device)
        if room is None:
            return BATCH
        fits = room // 2 // self._bytes_per_image  # half of it is for what the allocator cannot use
        return min(MAX_GPU_BATCH, 1 << max(0, fits.bit_length() - 1))


class _LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that anything inside gives."""

    bytes = 1

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.numel() * leaf.element_size())
        return result
