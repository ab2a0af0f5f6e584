"""Models of the open_clip library: CLIP, SigLIP, BiomedCLIP and others, with text.

`open_clip:NAME@TAG` is a model of open_clip's own list with one of its weights (or a file of weights),
`open_clip:OWNER/NAME` one of the Hub, `open_clip:DIR` a folder with open_clip_config.json and weights. A text tower of
transformers, as in BiomedCLIP, is built from the folder `hf_model_name` names below DIR, or from DIR/config.json; if
neither is there, its configuration comes from the Hub. A patch embedding is what pooling would return for it alone.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.devices import CPU, Device, run_in_halves, to_device
from fedvlm.encoders.huggingface import silence_transformers
from fedvlm.encoders.images import TorchvisionPixels
from fedvlm.encoders.openai import build_text_tower
from fedvlm.encoders.text import Tokens, check_length, tokenize_classes
from fedvlm.encoders.timm import explain_library_errors, library_name, pool_each_place, resample_of
from fedvlm.encoders.torch_encoder import TorchEncoder
from fedvlm.errors import EncoderError
from fedvlm.maths.text_tower import TextTower

CONFIG_FILE = "open_clip_config.json"


class OpenClip(TorchEncoder):
    """A frozen float32 model from a local folder, the Hub or open_clip's own list."""

    def __init__(self, source: str | Path, *, device: Device = "cpu") -> None:
        super().__init__(device)
        self.name = f"open_clip:{source}"
        with silence_transformers(), explain_library_errors(self.name, "open_clip", f"{CONFIG_FILE} and weights"):
            self.model, self._tokenizer, preprocess = load(self.name, str(source))
            self.preprocess = pixels_of_open_clip(self.name, preprocess)
        self.model.eval().requires_grad_(False)
        self.scale = float(self.model.logit_scale.exp())
        self.offers = frozenset({"image", "text"})
        with torch.inference_mode():
            pooled, grid = self._vectors(torch.zeros(1, 3, *self._side()), True)
        self.dim: int = pooled.shape[1]
        if grid is not None:
            self.offers |= {"patches"}
        if self._activation() is not None:
            self.offers |= {"text tower"}
        tokens = repr(self._tokens(["a photo of x-ray findings, No. 1"]))
        kind, tokenizer = f"open_clip {type(self.model.visual).__name__}", sha256(tokens.encode()).hexdigest()
        self.identity = self.describe_weights(kind, self.model.state_dict(), tokenizer=tokenizer)
        self.model.to(self.device)

    def _vectors(self, pixels: Tensor, patches: bool) -> tuple[Tensor, Tensor | None]:
        visual = self.model.visual
        if hasattr(visual, "trunk"):  # a model of timm with a projection
            features = visual.trunk.forward_features(pixels)

            def pool(some: Tensor) -> Tensor:
                return visual.head(visual.trunk.forward_head(some))  # type: ignore[no-any-return]

            return pool(features), pool_each_place(visual.trunk, pool, features) if patches else None
        if not patches or getattr(visual, "attn_pool", 0) is not None:  # ResNets and attention pools have no patches
            return visual(pixels), None
        tokens = visual.transformer(visual._embeds(pixels))
        pooled, _ = visual._pool(tokens)
        # the class token, or a mean, of a sequence whose tokens are all this one
        single = tokens[:, 1:].flatten(0, 1).unsqueeze(1).expand(-1, 2, -1)
        alone, _ = visual._pool(single)
        if visual.proj is not None:
            pooled, alone = pooled @ visual.proj, alone @ visual.proj
        return pooled, alone.reshape(len(tokens), tokens.shape[1] - 1, -1)

    def _side(self) -> tuple[int, int]:
        side = self.preprocess.crop or self.preprocess.size
        assert isinstance(side, tuple)
        return side

    @torch.inference_mode()
    def embed_text(self, sentences: Sequence[str]) -> Tensor:
        room: int = self._tokenizer.context_length
        longer = self._tokenizer(list(sentences), context_length=room + 1)
        shorter = self._tokenizer(list(sentences))
        for sentence, full, cut in zip(sentences, longer, shorter, strict=True):
            if not torch.equal(full[:room], cut):  # the library cuts without a word
                check_length(self.name, [sentence], [full.tolist()], room)
        return torch.cat(run_in_halves(self._text, shorter)).clone()

    def _text(self, ids: Tensor) -> Tensor:
        with self.halved():
            features = self.model.encode_text(ids.to(self.device))
        return normalize(features.float(), dim=-1).cpu()

    def text_tower(self, classes: Sequence[str], template: str) -> TextTower:
        """Return the differentiable text tower from context vectors to the features of these classes."""
        activation = self._activation()
        if activation is None:
            raise EncoderError(f"{self.name} has no text tower for prompts; use a CLIP model with CLIP's text tower")
        weights = {key.removeprefix("text."): value for key, value in self.model.state_dict().items()}
        heads = self._text_model().transformer.resblocks[0].attn.num_heads
        tokens = tokenize_classes(self._tokens, classes, template)
        tower = build_text_tower(weights, template, tokens, heads, activation)
        return to_device(tower, CPU) if self.half else tower  # engines move it to their device

    def _text_model(self) -> Any:
        return getattr(self.model, "text", self.model)

    def _activation(self) -> str | None:
        """Return the activation of a text tower like CLIP's; None if it is of another kind."""
        text = self._text_model()
        blocks = getattr(getattr(text, "transformer", None), "resblocks", None)
        if blocks is None or getattr(text, "cls_emb", None) is not None or text.attn_mask is None:
            return None
        block = blocks[0]
        usual = (
            getattr(text, "pool_type", getattr(text, "text_pool_type", "")) == "argmax"
            and isinstance(text.text_projection, Tensor)
            and isinstance(block.attn, torch.nn.MultiheadAttention)
            and isinstance(block.ls_1, torch.nn.Identity)
        )
        name = type(block.mlp.gelu).__name__
        return {"QuickGELU": "quick_gelu", "GELU": "gelu"}.get(name) if usual else None

    def _tokens(self, sentences: Sequence[str]) -> Tokens:
        """SOS ... EOT each, without padding."""
        rows = self._tokenizer(list(sentences)).tolist()
        return [row[: max(place for place, token in enumerate(row) if token) + 1] for row in rows]


def load(name: str, source: str) -> tuple[Any, Any, dict[str, Any]]:
    """Load the model, its tokenizer and its preprocessing."""
    import open_clip

    model_name, _, weights = source.partition("@")
    place = library_name(name, model_name)
    if not weights and ":" not in place:
        tags = open_clip.list_pretrained_tags_by_model(place)
        listed = f"for example {name}@{tags[0]}" if tags else "or give a directory"
        raise EncoderError(f"{name} names no weights; write NAME@TAG, {listed}")
    options: dict[str, Any] = {"precision": "fp32", "weights_only": True, "require_pretrained": True}
    if place.startswith("local-dir:"):
        options |= _local_text_tower(Path(place.removeprefix("local-dir:")))
    model = open_clip.create_model(place, pretrained=weights or None, **options)
    if open_clip.get_model_config(place) is None:
        raise EncoderError(f"{name} is not a model of open_clip; `open_clip.list_models()` lists them")
    return model, open_clip.get_tokenizer(place), open_clip.get_model_preprocess_cfg(model)


def _local_text_tower(folder: Path) -> dict[str, Any]:
    """Return the text settings that build a transformers text tower from the folder instead of the Hub."""
    model = json.loads((folder / CONFIG_FILE).read_text())["model_cfg"]
    text = model["text_cfg"]
    if "hf_model_name" not in text:
        return {}
    for place in (folder / str(text["hf_model_name"]), folder):
        if (place / "config.json").is_file():
            return {"text_cfg": {**text, "hf_model_name": str(place), "hf_model_pretrained": False}}
    return {}


def pixels_of_open_clip(name: str, config: dict[str, Any]) -> TorchvisionPixels:
    """Return the preprocessing of open_clip's transform for inference."""
    size, mode = config["size"], config.get("resize_mode", "shortest")
    height, width = (size, size) if isinstance(size, int) else size
    if mode not in ("shortest", "squash") or (mode == "shortest" and height != width):
        how = f"resize_mode {mode!r} to {height} x {width}, which fedvlm cannot reproduce"
        remedy = 'set resize_mode to "shortest" or "squash" in its configuration'
        raise EncoderError(f"{name} is preprocessed with {how}; {remedy}")
    resample = resample_of(name, config.get("interpolation", "bicubic"))
    colours: dict[str, Any] = {"mean": tuple(config["mean"]), "std": tuple(config["std"])}
    return TorchvisionPixels((height, width) if mode == "squash" else height, (height, width), resample, **colours)
