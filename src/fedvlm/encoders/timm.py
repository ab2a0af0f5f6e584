"""Image models of the timm library, without text.

`timm:NAME` is a model that timm knows, `timm:OWNER/NAME` one of the Hub, `timm:DIR` a folder with config.json and
model.safetensors. A patch embedding is what the model's pooling returns for that place alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import floor
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from fedvlm.devices import Device
from fedvlm.encoders.huggingface import DEFAULT_LOGIT_SCALE
from fedvlm.encoders.images import TorchvisionPixels
from fedvlm.encoders.torch_encoder import TorchEncoder
from fedvlm.errors import EncoderError, suggest_path


class Timm(TorchEncoder):
    """A frozen float32 model from a local folder, the Hub or timm's own list."""

    def __init__(self, source: str | Path, *, device: Device = "cpu") -> None:
        super().__init__(device)
        self.name = f"timm:{source}"
        with explain_library_errors(self.name, "timm", "config.json and model.safetensors"):
            import timm

            self.model = timm.create_model(library_name(self.name, str(source)), pretrained=True, num_classes=0)
            self.preprocess = pixels_of_timm(self.name, timm.data.resolve_data_config(model=self.model))
        self.model.eval().requires_grad_(False)
        self.scale = DEFAULT_LOGIT_SCALE
        self.offers = frozenset({"image", "patches"})
        kind = f"timm {self.model.pretrained_cfg.get('architecture')}"
        self.identity = self.describe_weights(kind, self.model.state_dict())
        self.model.to(self.device)
        with torch.inference_mode(), self.halved():
            blank = torch.zeros(1, 3, *self._side(), device=self.device)
            self.dim: int = self._vectors(blank, False)[0].shape[1]

    def _vectors(self, pixels: Tensor, patches: bool) -> tuple[Tensor, Tensor | None]:
        features = self.model.forward_features(pixels)
        pooled = self.model.forward_head(features)
        return pooled, pool_each_place(self.model, self.model.forward_head, features) if patches else None

    def _side(self) -> tuple[int, int]:
        assert self.preprocess.crop is not None
        return self.preprocess.crop


def pool_each_place(model: Any, pool: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
    """(images, places, dim) pool each token or each place of a feature map as if it were the only one."""
    prefix = getattr(model, "num_prefix_tokens", 0)
    if features.ndim == 3:  # (images, tokens, width); a class token, if any, stands first
        tokens = features[:, prefix:]
        # a class token, a mean and an attention over equal tokens all return that token
        single = tokens.flatten(0, 1).unsqueeze(1).expand(-1, prefix + 1, -1)
        return pool(single).reshape(*tokens.shape[:2], -1)
    channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
    places = features.flatten(1, 2) if channels_last else features.flatten(2).mT  # (images, places, width)
    single = places.flatten(0, 1)[:, None, None] if channels_last else places.flatten(0, 1)[:, :, None, None]
    return pool(single).reshape(*places.shape[:2], -1)


def pixels_of_timm(name: str, config: dict[str, Any]) -> TorchvisionPixels:
    """Return the preprocessing of timm's evaluation transform."""
    _, height, width = config["input_size"]
    resized = floor(height / config["crop_pct"]), floor(width / config["crop_pct"])
    mode = config.get("crop_mode") or "center"
    if mode not in ("center", "squash") or (mode == "center" and resized[0] != resized[1]):
        how = f"crop_mode {mode!r} to {height} x {width}, which fedvlm cannot reproduce"
        remedy = 'set crop_mode to "center" or "squash" in its config.json'
        raise EncoderError(f"{name} is preprocessed with {how}; {remedy}")
    resample = resample_of(name, config["interpolation"])
    colours: dict[str, Any] = {"mean": tuple(config["mean"]), "std": tuple(config["std"])}
    return TorchvisionPixels(resized if mode == "squash" else resized[0], (height, width), resample, **colours)


def resample_of(name: str, interpolation: str) -> int:
    """Return Pillow's number of an interpolation such as `bicubic`."""
    try:
        return int(Image.Resampling[interpolation.upper()])
    except KeyError:
        raise EncoderError(f"{name} resizes by {interpolation!r}; use bilinear, bicubic, nearest or lanczos") from None


def library_name(name: str, source: str) -> str:
    """Return how timm and open_clip write a folder, a model of the Hub, or a model of their own list."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return f"local-dir:{folder}"
    if folder.is_absolute() or source.startswith((".", "~")):
        raise EncoderError(f"{name}: there is no directory {folder}; {suggest_path(folder)}give a model's directory")
    return f"hf-hub:{source}" if "/" in source else source


@contextmanager
def explain_library_errors(name: str, package: str, needed: str) -> Iterator[None]:
    """Turn exceptions of a library of encoders into an EncoderError with a remedy."""
    try:
        yield
    except EncoderError:
        raise
    except ImportError as error:
        needs = f"{package} and a torchvision that fits torch"
        raise EncoderError(f"{name} needs {needs} ({error}); pip install 'fedvlm[{package}]'") from error
    except Exception as error:  # these libraries raise nearly every kind on files, names and the Hub
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = f"check the name and the network, or give a directory that holds {needed}"
        raise EncoderError(f"{name} cannot be opened ({first[:300]}); {remedy}") from error
