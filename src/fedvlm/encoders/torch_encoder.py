"""Base of encoders that compute with torch: on the CPU in float32, or on a GPU in float16."""

import json
import platform
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedvlm.devices import Device, choose_device, free_device_memory, is_out_of_memory, run_in_halves, set_deterministic
from fedvlm.encoders import BATCH, Vectors
from fedvlm.encoders.images import Pixels
from fedvlm.encoders.text import weights_hash
from fedvlm.errors import EncoderError

MAX_GPU_BATCH = 256  # images; a kill loses at most one batch
MIN_ONEDNN_WEIGHTS = 1 << 18  # of a linear layer; a smaller one gains nothing
TENSORS_PER_IMAGE = 8  # memory of one image in units of its largest tensor


class TorchEncoder:
    """Batches, precision and memory of an encoder that implements `_vectors`."""

    name: str
    preprocess: Pixels

    def __init__(self, device: Device) -> None:
        self.device = choose_device(device)
        self.half = self.device.type != "cpu"  # float16 on a GPU
        if self.half:
            set_deterministic()

    @property
    def dtype(self) -> str:
        return "float16" if self.half else "float32"

    def describe_weights(self, kind: str, weights: Mapping[str, Any], **more: str) -> dict[str, str]:
        """Return the identity of an encoder with these weights."""
        preprocess = json.dumps(self.preprocess.identity(), sort_keys=True)
        return {"kind": kind, "weights": weights_hash(weights), "dtype": self.dtype, "preprocess": preprocess, **more}

    def halved(self) -> "torch.autocast | OneDnnLinear":
        """Return the context that the model computes in."""
        if not self.half and has_slow_mkl():
            return OneDnnLinear()
        return torch.autocast(self.device.type, torch.float16, enabled=self.half)

    def _vectors(self, pixels: Tensor, patches: bool) -> tuple[Tensor, Tensor | None]:
        """Return pooled embeddings, and those of the patches if requested."""
        raise NotImplementedError

    def embed(self, batch: Sequence[NDArray[Any]] | Sequence[bytes], patches: bool) -> Vectors:
        pixels = torch.from_numpy(np.stack([np.asarray(array, np.float32) for array in batch]))
        try:
            parts = run_in_halves(lambda some: self._embed(some, patches), pixels)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise EncoderError(
                f"{self.name} has not enough memory for one image on {self.device} ({error}); "
                'close other programs that use it, or set access.device = "cpu"'
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
        """Estimate the memory that one image takes."""
        side = self._side()
        largest = _LargestTensor()  # type: ignore[no-untyped-call]
        with torch.inference_mode(), self.halved(), largest:
            self._vectors(torch.zeros(1, 3, *side, device=self.device), True)
        return TENSORS_PER_IMAGE * int(largest.bytes)

    def _side(self) -> tuple[int, int]:
        """Return height and width of a preprocessed image."""
        raise NotImplementedError

    @property
    def batch(self) -> int:
        """Images per batch; constant on a CPU, where rounding depends on the size of a batch."""
        room = None if self.device.type == "cpu" else free_device_memory(self.device)
        if room is None:
            return BATCH
        fits = room // 2 // self._bytes_per_image  # half is left for fragmentation
        return min(MAX_GPU_BATCH, 1 << max(0, fits.bit_length() - 1))


@cache
def has_slow_mkl() -> bool:
    """Return whether torch multiplies by MKL on an AMD processor, where MKL is half as fast as oneDNN."""
    cpuinfo = Path("/proc/cpuinfo")
    vendor = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    return "AuthenticAMD" in vendor and torch._C.has_mkl and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class OneDnnLinear(TorchFunctionMode):
    """Compute large float32 linear layers by oneDNN instead of MKL; results differ by rounding."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is linear and not kwargs and len(args) == 3:
            x, weight, bias = args
            if weight.numel() >= MIN_ONEDNN_WEIGHTS and x.dtype == weight.dtype == torch.float32 and x.ndim > 1:
                return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return function(*args, **(kwargs or {}))


class _LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the size of the largest tensor that an operation returns."""

    bytes = 1

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.numel() * leaf.element_size())
        return result
