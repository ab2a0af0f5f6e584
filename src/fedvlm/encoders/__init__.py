"""Encoders: what they offer, the kinds there are, and how to open one by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from fedvlm.errors import SettingsError, unknown_name

if TYPE_CHECKING:  # decoder processes import this module and do not need torch
    from torch import Tensor


__all__ = [
    "ENCODERS",
    "Encoder",
    "Kind",
    "Preprocess",
    "Vectors",
    "encoders",
    "fingerprint",
    "open_encoder",
    "register",
]
BATCH = 32  # images given to an encoder at once, unless it sets its own number


class Preprocess(Protocol):
    """Turn a decoded RGB image into the array that the encoder takes; pickled to decoder processes."""

    def __call__(self, image: Image) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Vectors:
    """The embeddings of a batch of images, not normalised."""

    pooled: NDArray[np.float32]  # (images, dim)
    patches: NDArray[np.float16] | None  # (images, patches, dim) through final norm and projection


class Encoder(Protocol):
    """A frozen encoder of images, and of text if it offers that.

    One that offers "text tower" has `text_tower(classes, template)`, one that offers "image tower" has `image_tower()`.
    """

    name: str  # as the user wrote it, e.g. "hf:openai/clip-vit-base-patch32"
    offers: frozenset[str]  # a subset of core.NEEDS
    dim: int
    scale: float  # logit scale
    identity: dict[str, str]  # what the fingerprint covers: weights, activation, dtype, resize, ...

    @property
    def preprocess(self) -> Preprocess | None:
        """None: the encoder takes the encoded bytes themselves."""
        ...

    def embed(self, batch: Sequence[NDArray[Any]] | Sequence[bytes], patches: bool) -> Vectors: ...

    def embed_text(self, sentences: Sequence[str]) -> "Tensor":
        """(sentences, dim) unit-norm float32; only if "text" is offered."""
        ...


@runtime_checkable
class Batching(Protocol):
    """An encoder that sets how many images it takes at once."""

    @property
    def batch(self) -> int: ...


@runtime_checkable
class WarningEncoder(Protocol):
    """An encoder that calls `warn` about problems while it embeds."""

    warn: Callable[[str], None] | None


@dataclass(frozen=True)
class Kind:
    """One kind of encoder, as `fedvlm list encoders` shows it."""

    form: str  # how its name is written; the part after the colon is passed to `build`
    summary: str
    offers: tuple[str, ...]  # at most; one encoder of the kind may offer less
    module: str  # imported when an encoder is opened, because that can take seconds
    build: str  # the function or class in it; its keyword-only parameters are the options

    @property
    def word(self) -> str:
        """The first word of its names."""
        return self.form.partition(":")[0]


_OPEN = ("image", "text", "patches", "text tower", "image tower")
_CLOSED = ("image", "text", "patches")
_BUILT_IN = (
    ("demo", "the small model that comes with fedvlm", _OPEN, "huggingface", "demo"),
    ("hf:NAME_OR_DIR", "CLIP, SigLIP, ViT or DINOv2 of transformers", _OPEN, "huggingface", "HuggingFace"),
    ("http:URL", "a black box behind `fedvlm serve-encoder`", _CLOSED, "http", "Http"),
    ("onnx:FILE_OR_DIR", "a compiled image (and text) tower", ("image", "text"), "onnx", "Onnx"),
    ("open_clip:NAME_OR_DIR", "CLIP, SigLIP, BiomedCLIP, … of open_clip", _OPEN[:4], "open_clip", "OpenClip"),
    ("openai:DIR_OR_FILE", "CLIP with a ResNet (RN50, RN101, …) of OpenAI's weights", _OPEN[:4], "openai", "OpenAI"),
    ("store:FILE_OR_DIR", "embeddings computed before", _CLOSED, "store", "Store"),
    ("timm:NAME_OR_DIR", "an image model of timm, without text", ("image", "patches"), "timm", "Timm"),
)
ENCODERS: dict[str, Kind] = {
    form.partition(":")[0]: Kind(form, summary, offers, f"{__name__}.{module}", build)
    for form, summary, offers, module, build in _BUILT_IN
}


# The core is imported inside the functions, because decoder processes do not need torch.
def register(kind: Kind) -> Kind:
    """Add a kind of encoder."""
    from fedvlm.core.contract import NEEDS
    from fedvlm.plugins import add_entry

    if not kind.offers or (unknown := set(kind.offers) - set(NEEDS)):
        wrong = min(unknown) if kind.offers else "nothing"
        raise SettingsError(f"encoder {kind.form}: it offers {wrong}; it can offer {', '.join(NEEDS)}")
    add_entry(ENCODERS, "encoder", kind.word, kind)
    return kind


def encoders() -> dict[str, Kind]:
    """Return all kinds: our own and those of outside packages (entry-point group fedvlm.encoders)."""
    from fedvlm.plugins import load_outside

    load_outside("fedvlm.encoders")
    return dict(sorted(ENCODERS.items()))


def find_kind(name: str) -> tuple[Kind, str]:
    """Return the kind of a written name such as `hf:openai/clip-vit-base-patch32`, and the part after the colon."""
    word, _, place = name.partition(":")
    if word == "https" or place.startswith("//"):
        word, place = "http", name
    kinds = encoders()
    if word not in kinds and Path(name).is_file():
        raise SettingsError(f"{name} is a file; if it holds embeddings, write --encoder store:{name}")
    if word not in kinds:
        raise unknown_name("encoder", word, kinds)
    if bool(place) != (":" in kinds[word].form):
        raise SettingsError(f"{name!r} does not name an encoder; write {kinds[word].form}")
    return kinds[word], place


def encoder_options(name: str) -> list[str]:
    """Return the names of the options that an encoder takes, such as `device`."""
    kind, _ = find_kind(name)
    parameters = signature(getattr(import_module(kind.module), kind.build)).parameters
    return [key for key, parameter in parameters.items() if parameter.kind == parameter.KEYWORD_ONLY]


def open_encoder(name: str, **options: Any) -> Encoder:
    """Open an encoder by its written name, such as `hf:openai/clip-vit-base-patch32` or `demo`."""
    kind, place = find_kind(name)
    allowed = encoder_options(name)
    for key in options:
        if key not in allowed:
            raise unknown_name(f"option of {kind.form}", key, allowed or ["(it has no options)"])
    build = getattr(import_module(kind.module), kind.build)
    encoder: Encoder = build(*([place] if place else []), **options)
    return encoder


def fingerprint(encoder: Encoder) -> str:
    """Return the hex digest of what determines an embedding: weights, activation, dtype, preprocessing."""
    words = (f"{key}\x1f{value}" for key, value in sorted(encoder.identity.items()))
    return sha256("\x1e".join(words).encode()).hexdigest()
