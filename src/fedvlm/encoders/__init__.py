"""Where embeddings come from."""

from collections.abc import Sequence
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

if TYPE_CHECKING:  # decoder processes import this module and have no use for torch
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


BATCH = 32  # images given to an encoder at once, unless it says otherwise


class Preprocess(Protocol):
    """From a decoded RGB image to the array the encoder takes; pickled to decoder processes."""

    def __call__(self, image: Image) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Vectors:
    """What an encoder answers for a batch of images; lengths are as the encoder gave them."""

    pooled: NDArray[np.float32]  # (images, dim)
    patches: NDArray[np.float16] | None  # (images, patches, dim) through final norm and projection


class Encoder(Protocol):
    """`text_tower(classes, template)`, a maths.prompts.TextTower, if "text tower" is offered."""

    name: str  # as the user wrote it, e.g. "hf:openai/clip-vit-base-patch32"
    offers: frozenset[str]  # a subset of core.NEEDS, as far as its owner opens it
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
    """An encoder that says how many images it takes at once."""

    @property
    def batch(self) -> int: ...


@dataclass(frozen=True)
class Kind:
    """One kind of encoder, as `fedvlm list encoders` shows it."""

    form: str  # how its name is written; what stands after a colon is given to `build`
    summary: str
    offers: tuple[str, ...]  # at most; one encoder of the kind may offer less
    module: str  # imported when one is opened, because that can take seconds
    build: str  # what is called there; its options are what it takes by name only

    @property
    def word(self) -> str:
        """What its names begin with."""
        return self.form.partition(":")[0]


_OPEN = ("image", "text", "patches", "text tower", "image tower")
_CLOSED = ("image", "text", "patches")
_BUILT_IN = (
    Kind("demo", "the small model that comes with fedvlm", _OPEN, f"{__name__}.huggingface", "demo"),
    Kind(
        "hf:NAME_OR_DIR",
        "CLIP, SigLIP, ViT or DINOv2 of transformers",
        _OPEN,
        f"{__name__}.huggingface",
        "HuggingFace",
    ),
    Kind(
        "http:URL",
        "a black box behind `fedvlm serve-encoder`",
        _CLOSED,
        f"{__name__}.http",
        "Http",
    ),
    Kind(
        "onnx:FILE_OR_DIR",
        "a compiled image (and text) tower",
        ("image", "text"),
        f"{__name__}.onnx",
        "Onnx",
    ),
    Kind(
        "openai:DIR_OR_FILE",
        "CLIP with a ResNet (RN50, RN101, …) of OpenAI's weights",
        ("image", "text", "patches", "text tower"),
        f"{__name__}.openai",
        "OpenAI",
    ),
    Kind("store:FILE_OR_DIR", "embeddings computed before", _CLOSED, f"{__name__}.store", "Store"),
)
ENCODERS: dict[str, Kind] = {kind.word: kind for kind in _BUILT_IN}


# The core is imported when it is asked for: decoder processes have no use for torch.
def register(kind: Kind) -> Kind:
    """Adds a kind of encoder."""
    from fedvlm.core.contract import NEEDS
    from fedvlm.plugins import add_entry

    if not kind.offers or (strange := set(kind.offers) - set(NEEDS)):
        wrong = min(strange) if kind.offers else "nothing"
        raise SettingsError(f"encoder {kind.form}: it offers {wrong}; it can offer {', '.join(NEEDS)}")
    add_entry(ENCODERS, "encoder", kind.word, kind)
    return kind


def encoders() -> dict[str, Kind]:
    """All kinds: our own and those of outside packages (entry-point group fedvlm.encoders)."""
    from fedvlm.plugins import load_outside

    load_outside("fedvlm.encoders")
    return dict(sorted(ENCODERS.items()))


def open_encoder(name: str, **options: Any) -> Encoder:
    """An encoder by its written name, such as `hf:openai/clip-vit-base-patch32` or `demo`."""
    word, _, rest = name.partition(":")
    if word == "https" or rest.startswith("//"):
        word, rest = "http", name
    kinds = encoders()
    if word not in kinds and Path(name).is_file():
        raise SettingsError(f"{name} is a file; if it holds embeddings: --encoder store:{name}")
    if word not in kinds:
        raise unknown_name("encoder", word, kinds)
    kind = kinds[word]
    if bool(rest) != (":" in kind.form):
        raise SettingsError(f"{name!r} does not name an encoder; write {kind.form}")
    build = getattr(import_module(kind.module), kind.build)
    allowed = [
        key for key, parameter in signature(build).parameters.items() if parameter.kind == parameter.KEYWORD_ONLY
    ]
    for key in options:
        if key not in allowed:
            raise unknown_name(f"option of {kind.form}", key, allowed or ["(it has no options)"])
    encoder: Encoder = build(*([rest] if rest else []), **options)
    return encoder


def fingerprint(encoder: Encoder) -> str:
    """Hex digest of what decides an embedding: weights, activation, dtype, preprocessing."""
    words = (f"{key}\x1f{value}" for key, value in sorted(encoder.identity.items()))
    return sha256("\x1e".join(words).encode()).hexdigest()
