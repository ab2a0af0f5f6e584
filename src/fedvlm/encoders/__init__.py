"""Where embeddings come from."""

from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from inspect import signature
from typing import Any

from fedvlm.encoders.interface import Encoder
from fedvlm.errors import SettingsError, unknown

__all__ = ["ENCODERS", "Encoder", "Kind", "fingerprint", "open_encoder"]


@dataclass(frozen=True)
class Kind:
    """One kind of encoder, as `fedvlm list encoders` shows it."""

    form: str  # how its name is written
    what: str
    offers: tuple[str, ...]  # at most; one encoder of the kind may offer less
    module: str  # of this package; imported when one is opened, because that can take seconds
    build: str


_OPEN = ("image", "text", "patches", "text tower", "image tower")
_CLOSED = ("image", "text", "patches")
ENCODERS: dict[str, Kind] = {
    "demo": Kind("demo", "the small model that comes with fedvlm", _OPEN, "demo", "demo"),
    "hf": Kind(
        "hf:NAME_OR_DIR",
        "CLIP, SigLIP, ViT or DINOv2 of transformers",
        _OPEN,
        "huggingface",
        "HuggingFace",
    ),
    "http": Kind("http:URL", "a black box behind `fedvlm serve-encoder`", _CLOSED, "http", "Http"),
    "onnx": Kind(
        "onnx:FILE_OR_DIR", "a compiled image (and text) tower", ("image", "text"), "onnx", "Onnx"
    ),
    "store": Kind("store:FILE_OR_DIR", "embeddings computed before", _CLOSED, "store", "Store"),
}


def open_encoder(name: str, **options: Any) -> Encoder:
    """An encoder by its written name, such as `hf:openai/clip-vit-base-patch32` or `demo`."""
    word, _, rest = name.partition(":")
    if word == "https" or rest.startswith("//"):
        word, rest = "http", name
    if word not in ENCODERS:
        raise unknown("encoder", word, ENCODERS)
    kind = ENCODERS[word]
    if bool(rest) == (word == "demo"):
        raise SettingsError(f"{name!r} does not name an encoder; write {kind.form}")
    build = getattr(import_module(f"fedvlm.encoders.{kind.module}"), kind.build)
    known = [
        key for key, one in signature(build).parameters.items() if one.kind == one.KEYWORD_ONLY
    ]
    for key in options:
        if key not in known:
            raise unknown(f"option of {kind.form}", key, known or ["(it has no options)"])
    encoder: Encoder = build(*([rest] if rest else []), **options)
    return encoder


def fingerprint(encoder: Encoder) -> str:
    """Hex digest of what decides an embedding: weights, activation, dtype, preprocessing."""
    words = (f"{key}\x1f{value}" for key, value in sorted(encoder.identity.items()))
    return sha256("\x1e".join(words).encode()).hexdigest()
