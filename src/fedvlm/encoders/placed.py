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

from fedvlm.devices import Device, choose, free, in_halves, out_of_memory, repeatable
from fedvlm.encoders.interface import BATCH, Vectors
from fedvlm.errors import EncoderError

MOST = 256  # images at once on a GPU: also what a kill can cost
HELD = 8  # times its largest tensor that an image takes on its way


class Placed:
    """The verbs of an encoder over `_vectors`, which knows nothing of memory and precision."""

    name: str

    def __init__(self, device: Device) -> None:
        self.device = choose(device)
        self.half = self.device.type != "cpu"  # on a GPU images and sentences go in float16
        if self.half:
            repeatable()

    @property
    def dtype(self) -> str:
        return "float16" if self.half else "float32"

    def halved(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.float16, enabled=self.half)

    def _vectors(self, pixels: Tensor, patches: bool) -> tuple[Tensor, Tensor | None]:
        """Pooled embeddings, and those of patches if they are asked for."""
        raise NotImplementedError

    def embed(self, batch: Sequence[NDArray[Any]] | Sequence[bytes], patches: bool) -> Vectors:
        pixels = torch.from_numpy(np.stack([np.asarray(one, np.float32) for one in batch]))
        try:
            many = in_halves(lambda some: self._embed(some, patches), pixels)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise EncoderError(
                f"{self.name} finds no memory for one image on {self.device} ({error}); "
                'close what else uses it, or set access.device = "cpu"'
            ) from error
        grids = [grid for _, grid in many if grid is not None]
        pooled = np.concatenate([one for one, _ in many])
        return Vectors(pooled, np.concatenate(grids) if grids else None)

    @torch.inference_mode()
    def _embed(
        self, pixels: Tensor, patches: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.float16] | None]:
        with self.halved():
            pooled, grid = self._vectors(pixels.to(self.device), patches)
        places = None if grid is None else grid.to(torch.float16).cpu().numpy()
        return pooled.float().cpu().numpy(), places

    @cached_property
    def _each(self) -> int:
        """Bytes an image takes on its way, roughly."""
        side = self._side()
        largest = _Largest()  # type: ignore[no-untyped-call]
        with torch.inference_mode(), self.halved(), largest:
            self._vectors(torch.zeros(1, 3, *side, device=self.device), True)
        return HELD * int(largest.bytes)

    def _side(self) -> tuple[int, int]:
        """Height and width of an image as the encoder takes it."""
        raise NotImplementedError

    @property
    def batch(self) -> int:
        """Images to be given at once.

        On a CPU rounding follows the size of a batch, so it is always the same there.
        """
        room = None if self.device.type == "cpu" else free(self.device)
        if room is None:
            return BATCH
        fits = room // 2 // self._each  # half of it is for what the allocator cannot use
        return min(MOST, 1 << max(0, fits.bit_length() - 1))


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that anything inside gives."""

    bytes = 1

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = operation(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor):
                self.bytes = max(self.bytes, one.numel() * one.element_size())
        return found
