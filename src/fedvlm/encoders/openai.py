"""CLIP with a ResNet image tower, from OpenAI's weights: RN50, RN101, RN50x4, ...

A folder holds the state dict as one .safetensors file, with the names of the original release, and the tokenizer.json
that all of OpenAI's CLIP models share. A patch embedding is the output of the attention pool with that place of the
last feature map as query, as in the public code of FedOTP.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.devices import CPU, Device, to_device
from fedvlm.encoders.images import Pixels
from fedvlm.encoders.text import Tokens, check_length, load_tokenizer, text_tower_inputs, tokenize_classes
from fedvlm.encoders.torch_encoder import TorchEncoder
from fedvlm.errors import EncoderError, suggest_path
from fedvlm.maths import resnet
from fedvlm.maths.resnet import Weights
from fedvlm.maths.text_tower import Affine, Layer, TextTower

VISUAL_PREFIX = "visual."
HEAD_WIDTH = 64  # of an attention head of the text tower
LAYER_NORM_EPS = 1e-5  # of the text tower
ACTIVATION = "quick_gelu"


class OpenAI(TorchEncoder):
    """A frozen float32 model from a local folder or file."""

    def __init__(self, source: str | Path, *, device: Device = "cpu") -> None:
        super().__init__(device)
        self.name = f"openai:{source}"
        file = find_weights(self.name, Path(source).expanduser())
        weights = read_weights(self.name, file)
        self._weights = to_device(weights, self.device)
        visual = {k.removeprefix(VISUAL_PREFIX): v for k, v in self._weights.items() if k.startswith(VISUAL_PREFIX)}
        try:
            self._shape = resnet.shape_of(visual)
            self._visual = visual
            self.dim = self._shape.dim
            self.scale = float(self._weights["logit_scale"].exp())
            size = self._shape.pixels
            self.preprocess = Pixels(size, (size, size))
            # check that all weights exist and fit
            self._embed(torch.zeros(1, 3, size, size), True)
            self.offers = frozenset({"image", "patches"})
            vocabulary = file.parent / "tokenizer.json"
            self._tokenizer: Any = load_tokenizer(vocabulary, "get it again") if vocabulary.is_file() else None
            if self._tokenizer is not None:
                self.offers |= {"text", "text tower"}
                self.embed_text(["a"])
        except (KeyError, ValueError, RuntimeError, IndexError) as error:
            raise EncoderError(
                f"{self.name} is not a CLIP model with a ResNet and OpenAI's names of weights "
                f"({type(error).__name__}: {error}); for a ViT use hf:openai/clip-vit-base-patch16"
            ) from error
        self.identity = self.describe_weights("openai resnet", weights, activation=ACTIVATION)
        if self._tokenizer is not None:
            words = json.dumps(sorted(self._tokenizer.get_vocab().items()))
            self.identity["tokenizer"] = sha256(words.encode()).hexdigest()

    def _vectors(self, pixels: Tensor, patches: bool) -> tuple[Tensor, Tensor | None]:
        vectors = resnet.embed(self._visual, self._shape, pixels, patches)
        return vectors[:, 0], vectors[:, 1:] if patches else None

    def _side(self) -> tuple[int, int]:
        return self._shape.pixels, self._shape.pixels

    @torch.inference_mode()
    def embed_text(self, sentences: Sequence[str]) -> Tensor:
        if "text" not in self.offers:
            raise EncoderError(f"{self.name} has no text; put CLIP's tokenizer.json into its folder")
        rows = self._tokens(sentences)
        check_length(self.name, sentences, rows, self._weights["positional_embedding"].shape[0])
        tower = self._tower("{}", rows, 1)  # only the start token precedes a sentence
        with self.halved():
            features = tower.encode(torch.zeros(0, tower.width, device=self.device))
        return normalize(features.float(), dim=-1).cpu() if self.half else features.clone()

    def text_tower(self, classes: Sequence[str], template: str) -> TextTower:
        """Return the differentiable text tower from context vectors to the features of these classes."""
        tower = self._tower(template, *tokenize_classes(self._tokens, classes, template))
        return to_device(tower, CPU) if self.half else tower  # engines move it to their device

    def _tokens(self, sentences: Sequence[str]) -> list[list[int]]:
        """SOS ... EOT each."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(sentences))]

    def _tower(self, template: str, tokens: Tokens, cut: int) -> TextTower:
        heads = self._weights["text_projection"].shape[0] // HEAD_WIDTH
        return build_text_tower(self._weights, template, (tokens, cut), heads, ACTIVATION)


def build_text_tower(
    weights: Weights, template: str, sentences: tuple[Tokens, int], heads: int, activation: str
) -> TextTower:
    """Return the text tower from weights with the names of OpenAI's release, for tokens and their common prefix."""
    count = len({key.split(".")[2] for key in weights if key.startswith("transformer.resblocks.")})
    blocks = [f"transformer.resblocks.{number}." for number in range(count)]
    return TextTower(
        **text_tower_inputs(*sentences, weights["token_embedding.weight"]),
        template=template,
        positions=weights["positional_embedding"],
        layers=tuple(_layer(weights, block) for block in blocks),
        final=_affine(weights, "ln_final"),
        projection=weights["text_projection"].mT,
        heads=heads,
        eps=LAYER_NORM_EPS,
        activation=activation,
    )


def find_weights(name: str, path: Path) -> Path:
    """Return the only file of weights in a folder, or the given file."""
    if path.is_dir():
        candidates = sorted(path.glob("*.safetensors"))
        if len(candidates) == 1:
            return candidates[0]
        raise EncoderError(f"{name}: {path} holds {len(candidates)} .safetensors files; put the state dict in one")
    if path.suffix != ".safetensors" or not path.is_file():
        problem = "is not a .safetensors file" if path.is_file() else "is not there"
        remedy = "a .pt is not read, because it may hold code: save its state dict as .safetensors"
        raise EncoderError(f"{name}: {path} {problem}; {suggest_path(path)}{remedy}")
    return path


def read_weights(name: str, file: Path) -> Weights:
    """Read all weights in float32."""
    from safetensors.torch import load_file

    try:
        weights = load_file(file)
    except Exception as error:  # safetensors has an exception of its own for a broken header
        raise EncoderError(f"{name}: {file} cannot be read ({error}); get it again") from error
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in weights.items()}


def _affine(weights: Weights, name: str) -> Affine:
    return Affine(weights[f"{name}.weight"], weights[f"{name}.bias"])


def _layer(weights: Weights, block: str) -> Layer:
    joint = Affine(weights[f"{block}attn.in_proj_weight"], weights[f"{block}attn.in_proj_bias"])
    names = ("ln_1", "attn.out_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    first, *rest = (_affine(weights, f"{block}{name}") for name in names)
    return Layer(first, joint, *rest)
