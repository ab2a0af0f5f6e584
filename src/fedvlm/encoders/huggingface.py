"""Encoders of the transformers library: CLIP, SigLIP, and vision models without text.

All offer pooled and patch embeddings. A patch embedding is what pooling would return for that patch alone:
CLIP: the token through the last layer norm and the projection, as the class token goes.
SigLIP: the token through the last layer norm and the pooling head's value path and MLP.
ViT, DINOv2: the token after the last layer norm, beside the class token.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from fedvlm.devices import CPU, Device, is_out_of_memory, run_in_halves, to_device
from fedvlm.encoders.images import Pixels
from fedvlm.encoders.text import check_length, text_tower_inputs, tokenize_classes
from fedvlm.encoders.torch_encoder import TorchEncoder
from fedvlm.errors import EncoderError
from fedvlm.hub import is_local_only
from fedvlm.maths.image_tower import ImageTower
from fedvlm.maths.text_tower import ACTIVATIONS, Affine, Layer, TextTower

# The model class and the processor whose defaults hold where preprocessor_config.json is silent.
# Fixed-size SigLIP 2 checkpoints are of type siglip.
FAMILIES = {
    "clip": ("CLIPModel", "CLIP"),
    "siglip": ("SiglipModel", "Siglip"),
    "vit": ("ViTModel", "ViT"),
    "deit": ("DeiTModel", "DeiT"),
    "dinov2": ("Dinov2Model", "Bit"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Bit"),
}
DEFAULT_LOGIT_SCALE = 100.0  # CLIP's, for vision models, which have none


class HuggingFace(TorchEncoder):
    """A frozen float32 model from a local directory or the Hub."""

    def __init__(self, source: str | Path, name: str | None = None, *, device: Device = "cpu") -> None:
        super().__init__(device)
        self.name = name or f"hf:{source}"
        local_only = is_local_only(source)
        with silence_transformers(), explain_load_errors(self.name, source):
            config, self.model, self.tokenizer, self.preprocess = load(source, local_only)
        self.kind: str = config.model_type
        self.model.eval().requires_grad_(False)
        has_text = self.kind in ("clip", "siglip")
        vision = config.vision_config if has_text else config
        self._patch: int = vision.patch_size
        if self.kind == "clip":
            self.dim: int = config.projection_dim
        else:
            self.dim = vision.hidden_size
        self.scale = float(self.model.logit_scale.exp()) if has_text else DEFAULT_LOGIT_SCALE
        # SigLIP adds it to every logit before its sigmoid; a softmax over classes does not see it
        self.bias = float(self.model.logit_bias) if self.kind == "siglip" else 0.0
        offers = {"image", "patches", "image tower"}
        if has_text and self.tokenizer is not None:
            offers.add("text")
            if self.kind == "clip" and config.text_config.hidden_act in ACTIVATIONS:
                offers.add("text tower")
        self.offers = frozenset(offers)
        kind, weights = f"huggingface {self.kind}", self.model.state_dict()
        self.identity = self.describe_weights(kind, weights, activation=vision.hidden_act)
        if self.tokenizer is not None:
            words = json.dumps(sorted(self.tokenizer.get_vocab().items()))
            self.identity["tokenizer"] = sha256(words.encode()).hexdigest()
        self.model.to(self.device)

    def _vectors(self, pixels: Tensor, patches: bool) -> tuple[Tensor, Tensor | None]:
        try:
            pooled, tokens = self._image(pixels)
            return pooled, self._patches(tokens) if patches else None
        except (ValueError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            problem = f"{self.name} cannot take images of {tuple(pixels.shape[1:])} ({error})"
            raise EncoderError(f"{problem}; its preprocessor_config.json does not fit its config.json") from error

    def _side(self) -> tuple[int, int]:
        side = self.preprocess.crop or self.preprocess.size
        return side if isinstance(side, tuple) else (side or 224,) * 2

    def _image(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return pooled embeddings and the last hidden states of the patches."""
        if self.kind in ("clip", "siglip"):
            answer = self.model.get_image_features(pixel_values=pixels)
            pooled = answer.pooler_output
        else:
            answer = self.model(pixel_values=pixels)
            pooled = answer.last_hidden_state[:, 0]
        # DINOv2 takes other sizes than it was trained on, and class and register tokens come first
        count = (pixels.shape[2] // self._patch) * (pixels.shape[3] // self._patch)
        return pooled, answer.last_hidden_state[:, -count:]

    def _patches(self, tokens: Tensor) -> Tensor:
        if self.kind == "clip":
            normed = self.model.vision_model.post_layernorm(tokens)
            return self.model.visual_projection(normed)  # type: ignore[no-any-return]
        if self.kind == "siglip":
            head = self.model.vision_model.head
            weight = head.attention.in_proj_weight[-self.dim :]
            value = linear(tokens, weight, head.attention.in_proj_bias[-self.dim :])
            attended = head.attention.out_proj(value)
            return attended + head.mlp(head.layernorm(attended))  # type: ignore[no-any-return]
        return tokens

    @torch.inference_mode()
    def embed_text(self, sentences: Sequence[str]) -> Tensor:
        if "text" not in self.offers:
            raise EncoderError(f"{self.name} has no text; use a CLIP or SigLIP model")
        room = self.model.config.text_config.max_position_embeddings
        rows = self.tokenizer(list(sentences))["input_ids"]
        check_length(self.name, sentences, rows, room)
        # SigLIP was trained on sentences padded to full length and without a mask
        length = room if self.kind == "siglip" else max(len(row) for row in rows)
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows])
        return torch.cat(run_in_halves(self._text, ids)).clone()

    def _text(self, ids: Tensor) -> Tensor:
        with self.halved():
            features = self.model.get_text_features(input_ids=ids.to(self.device)).pooler_output
        return normalize(features.float(), dim=-1).cpu()

    def image_tower(self) -> ImageTower:
        """Return the differentiable image tower from weights and pixels to pooled embeddings."""
        tower = ImageTower(self.model, lambda pixels: self._image(pixels)[0])
        return tower.to(CPU) if self.half else tower  # engines move it to their device

    def text_tower(self, classes: Sequence[str], template: str) -> TextTower:
        """Return the differentiable text tower from context vectors to the features of these classes."""
        if "text tower" not in self.offers:
            raise EncoderError(f"{self.name} has no text tower for prompts; use a CLIP model")
        text, config = self.model.text_model, self.model.config.text_config
        tokens, cut = tokenize_classes(lambda sentences: self.tokenizer(sentences)["input_ids"], classes, template)
        tower = TextTower(
            **text_tower_inputs(tokens, cut, text.embeddings.token_embedding.weight),
            template=template,
            positions=text.embeddings.position_embedding.weight,
            layers=tuple(_layer(layer) for layer in text.encoder.layers),
            final=_affine(text.final_layer_norm),
            projection=self.model.text_projection.weight,
            heads=config.num_attention_heads,
            eps=config.layer_norm_eps,
            activation=config.hidden_act,
        )
        return to_device(tower, CPU) if self.half else tower


def load(source: str | Path, local_only: bool) -> tuple[Any, Any, Any, Pixels]:
    """Load configuration, model, tokenizer (or None) and preprocessing; `local_only`: without the Hub."""
    import transformers

    folder = Path(source).expanduser()
    location = str(folder) if folder.is_dir() else str(source)
    # explicit, because the default may ask the user: code of a model is never run
    options = {"local_files_only": local_only, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(location, **options)
    if config.model_type not in FAMILIES:
        raise EncoderError(f"{source} is of type {config.model_type!r}; supported types are {', '.join(FAMILIES)}")
    preprocess = _pixels(transformers, location, config.model_type, options)
    family = getattr(transformers, FAMILIES[config.model_type][0])
    shape: dict[str, Any] = {"add_pooling_layer": False} if config.model_type in ("vit", "deit") else {}
    shape |= {"config": config, "dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, loading = family.from_pretrained(location, **shape, **options)
    if loading["missing_keys"]:
        missing = loading["missing_keys"]
        raise EncoderError(f"the weights of {source} lack {min(missing)} and {len(missing) - 1} more; get all of them")
    tokenizer = None
    if hasattr(config, "text_config"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(location, **options)
    return config, model, tokenizer, preprocess


def _pixels(transformers: Any, location: str, kind: str, options: dict[str, Any]) -> Pixels:
    mixin = transformers.image_processing_base.ImageProcessingMixin
    settings, _ = mixin.get_image_processor_dict(location, **options)
    kind_named = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or "")
    brand = kind_named.split("ImageProcessor")[0].split("FeatureExtractor")[0] or FAMILIES[kind][1]
    processor_class = getattr(transformers, f"{brand}ImageProcessorPil", None)
    if brand not in {family for _, family in FAMILIES.values()} or processor_class is None:
        raise EncoderError(f"{location} is preprocessed by {kind_named}, which fedvlm cannot reproduce")
    processed = processor_class(**settings).to_dict()
    size, crop = processed["size"], processed.get("crop_size")
    if processed.get("do_resize") and set(size) not in ({"height", "width"}, {"shortest_edge"}):
        raise EncoderError(f"{location} resizes to {size}; supported are height and width, or shortest_edge")
    normal = processed.get("do_normalize")
    return Pixels(
        size=(size.get("shortest_edge") or (size["height"], size["width"])) if processed.get("do_resize") else None,
        crop=(crop["height"], crop["width"]) if processed.get("do_center_crop") else None,
        resample=int(processed["resample"]),
        rescale=processed["rescale_factor"] if processed.get("do_rescale") else None,
        mean=tuple(processed["image_mean"]) if normal else None,
        std=tuple(processed["image_std"]) if normal else None,
    )


def _affine(module: Any) -> Affine:
    return Affine(module.weight, module.bias)


def _layer(layer: Any) -> Layer:
    attention = layer.self_attn
    three = (attention.q_proj, attention.k_proj, attention.v_proj)
    joint = Affine(torch.cat([m.weight for m in three]), torch.cat([m.bias for m in three]))
    rest = (attention.out_proj, layer.layer_norm2, layer.mlp.fc1, layer.mlp.fc2)
    return Layer(_affine(layer.layer_norm1), joint, *map(_affine, rest))


@contextmanager
def explain_load_errors(name: str, source: str | Path) -> Iterator[None]:
    """Turn exceptions of transformers about files and the Hub into an EncoderError with a remedy."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = (
            "put config.json, model.safetensors, preprocessor_config.json and tokenizer.json there"
            if Path(source).expanduser().is_dir()
            else "check the name and the network, or give a directory that holds the model"
        )
        raise EncoderError(f"{name} cannot be opened ({first}); {remedy}") from error


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence the progress bars and load reports of transformers; problems are raised."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def demo_directory() -> Path:
    directory = Path(str(files("fedvlm.encoders") / "demo_model"))
    if not (directory / "config.json").is_file():
        raise EncoderError(f"the demo model is not in {directory}; reinstall fedvlm or name another encoder")
    return directory


def demo(*, device: Device = "cpu") -> HuggingFace:
    return HuggingFace(demo_directory(), name="demo", device=device)
