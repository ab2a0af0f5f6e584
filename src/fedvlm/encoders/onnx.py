"""A compiled encoder: an image tower in ONNX, and optionally a text tower.

A directory holds image.onnx, optionally text.onnx with tokenizer.json, and optionally encoder.json;
a single FILE.onnx is an image tower with FILE.json. The JSON may set size, resize ("shortest" edge and centre crop, or
"squash"), resample, mean, std, scale, and for text: length and pad.
"""

import json
from collections.abc import Iterator, Sequence
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.encoders import Vectors
from fedvlm.encoders.images import CLIP_MEAN, CLIP_STD, Pixels
from fedvlm.encoders.text import check_length, load_tokenizer
from fedvlm.errors import EncoderError, suggest_path, unknown_name
from fedvlm.plugins import require

DEFAULTS: dict[str, Any] = {
    "size": None,  # default: that of the model, if it is fixed
    "resize": "shortest",
    "resample": "bicubic",
    "mean": list(CLIP_MEAN),
    "std": list(CLIP_STD),
    "scale": 100.0,
    "length": 77,
    "pad": 0,
}


class Onnx:
    def __init__(self, source: str | Path) -> None:
        self.name = f"onnx:{source}"
        path = Path(source).expanduser()
        image = path / "image.onnx" if path.is_dir() else path
        if not image.is_file():
            raise EncoderError(f"there is no file {image}; {suggest_path(image)}give an .onnx file or its directory")
        settings = _settings(path / "encoder.json" if path.is_dir() else path.with_suffix(".json"))
        self.scale = float(settings["scale"])
        self._image = OnnxModel(image)
        size = self._image.image(settings["size"])
        squash = settings["resize"] == "squash"
        edges, crop = ((size, size), None) if squash else (size, (size, size))
        resample = int(Image.Resampling[settings["resample"].upper()])
        colours: dict[str, Any] = {"mean": tuple(settings["mean"]), "std": tuple(settings["std"])}
        self.preprocess = Pixels(edges, crop, resample, **colours)
        blank = np.zeros((1, 3, size, size), np.float32)
        self.dim: int = self._image.run(blank).shape[1]
        self.identity = {"kind": "onnx", "weights": self._image.digest, "dtype": "as compiled"}
        self.identity["preprocess"] = json.dumps(self.preprocess.identity(), sort_keys=True)
        offers = {"image"}
        self._text: OnnxModel | None = None
        if path.is_dir() and (path / "text.onnx").is_file():
            self._text = OnnxModel(path / "text.onnx")
            self._tokenizer = load_tokenizer(path / "tokenizer.json", "put one beside text.onnx")
            self._tokenizer.enable_padding(length=settings["length"], pad_id=settings["pad"])
            self.identity["text"] = self._text.digest
            words = (path / "tokenizer.json").read_bytes()
            padding = f"{settings['length']} {settings['pad']}"
            self.identity["tokenizer"] = f"{sha256(words).hexdigest()} {padding}"
            offers.add("text")
        self.offers = frozenset(offers)

    def embed(self, batch: Sequence[NDArray[Any]] | Sequence[bytes], patches: bool) -> Vectors:
        if patches:
            raise EncoderError(f"{self.name} has no patch embeddings; use an hf: encoder")
        pixels = np.stack([np.asarray(image, np.float32) for image in batch])
        return Vectors(self._image.run(pixels, self.dim), None)

    def embed_text(self, sentences: Sequence[str]) -> Tensor:
        if self._text is None:
            raise EncoderError(f"{self.name} has no text; put text.onnx and tokenizer.json beside it")
        tokens = self._tokenizer.encode_batch(list(sentences))
        room = self._tokenizer.padding["length"]
        check_length(self.name, sentences, [encoding.ids for encoding in tokens], room)
        ids = np.array([encoding.ids for encoding in tokens])
        mask = np.array([encoding.attention_mask for encoding in tokens])
        features = self._text.run(ids, self.dim, mask)
        return normalize(torch.from_numpy(features), dim=-1)


class OnnxModel:
    """An ONNX file whose first input is the batch, with one output of (batch, dim)."""

    def __init__(self, file: Path) -> None:
        onnxruntime = require("onnxruntime", "onnxruntime is not installed", "onnx", EncoderError)
        options = onnxruntime.SessionOptions()
        # processes share the cores, and one thread makes sums reproducible
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        self.file = file
        self.digest = _digest(file)
        try:
            self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has many exception types
            first = str(error).splitlines()[0]
            raise EncoderError(f"{file} cannot be opened ({first}); export it again") from error
        self.inputs = self.session.get_inputs()
        outputs = self.session.get_outputs()
        flat = [output.name for output in outputs if len(output.shape or ()) == 2]
        named = [output for output in flat if output in ("image_embeds", "text_embeds")]
        if len(named or flat) != 1:
            listed = ", ".join(f"{output.name} {output.shape}" for output in outputs)
            wanted = "one output of (batch, dim), or image_embeds or text_embeds"
            raise EncoderError(f"{file} must have {wanted}; it has {listed}")
        self.output = (named or flat)[0]

    def image(self, size: int | None) -> int:
        """Return the edge of the images, from the settings or from the shape of the input."""
        shape = self.inputs[0].shape
        if len(self.inputs) != 1 or len(shape) != 4 or "float" not in self.inputs[0].type:
            listed = ", ".join(f"{given.name} {given.type} {given.shape}" for given in self.inputs)
            raise EncoderError(f"{self.file} must take one input of (batch, 3, height, width) floats; it has {listed}")
        fixed = [edge for edge in shape[2:] if isinstance(edge, int)]
        expected = size or (fixed[0] if fixed else None)
        if expected is None:
            raise EncoderError(f'{self.file} takes any image size; write {{"size": 224}} in the JSON beside it')
        if any(edge != expected for edge in fixed) or shape[1] not in (3, None, str(shape[1])):
            wanted = [3, expected, expected]
            raise EncoderError(f"{self.file} takes images of {shape[1:]}, not of {wanted}; correct the size")
        return int(expected)

    def run(self, batch: NDArray[Any], dim: int | None = None, mask: NDArray[Any] | None = None) -> NDArray[np.float32]:
        feeds = {}
        for model_input in self.inputs:
            values = mask if "mask" in model_input.name and mask is not None else batch
            feeds[model_input.name] = values.astype(_TYPES.get(model_input.type, values.dtype))
        fixed = self.inputs[0].shape[0]
        step = fixed if isinstance(fixed, int) else len(batch)
        parts = []
        try:
            for first in range(0, len(batch), step):
                # a model with a fixed batch size gets the last row repeated
                rows = np.arange(first, first + step).clip(max=len(batch) - 1)
                feed = {key: value[rows] for key, value in feeds.items()}
                parts.append(self.session.run([self.output], feed)[0])
        except Exception as error:  # onnxruntime has many exception types
            first_line = str(error).splitlines()[0]
            raise EncoderError(f"{self.file} does not take this batch ({first_line})") from error
        answer = np.concatenate(parts)[: len(batch)]
        if len(answer) != len(batch) or answer.shape[1] != (dim or answer.shape[1]):
            expected = f"; the image tower returns {dim} numbers" if dim else ""
            raise EncoderError(f"{self.file} returns {answer.shape} for a batch of {len(batch)}{expected}")
        return np.asarray(answer, np.float32)


_KINDS = {"float": "float32", "float16": "float16", "double": "float64", "int64": "int64", "int32": "int32"}
_TYPES = {f"tensor({name})": np.dtype(kind) for name, kind in _KINDS.items()}


def _settings(file: Path) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if file.is_file():
        try:
            overrides = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise EncoderError(f"{file} is not JSON ({error}); correct it") from error
    for key in overrides:
        if key not in DEFAULTS:
            raise unknown_name(f"key of {file.name}", key, DEFAULTS)
    settings = DEFAULTS | overrides
    if settings["resize"] not in ("shortest", "squash"):
        raise EncoderError(f"{file}: resize = {settings['resize']!r}; write shortest or squash")
    if settings["resample"].upper() not in Image.Resampling.__members__:
        raise unknown_name(f"resample in {file.name}", settings["resample"], ("bicubic", "bilinear"))
    if len(settings["mean"]) != 3 or len(settings["std"]) != 3 or min(settings["std"]) <= 0:
        raise EncoderError(f"{file}: mean and std take three numbers each, std above 0")
    return settings


def _digest(file: Path) -> str:
    """Digest the file and every file beside it that holds weights of its graph."""
    import onnx

    try:
        graph = onnx.load(file, load_external_data=False)
    except Exception as error:  # protobuf has its own exception types
        raise EncoderError(f"{file} cannot be opened ({error}); export it again") from error
    home, digests = file.parent.resolve(), []
    for name in ["", *sorted(set(_external_files(graph)))]:
        path = (home / name).resolve() if name else file
        if name and (Path(name).is_absolute() or home not in path.parents or not path.is_file()):
            raise EncoderError(f"{file} has weights in {name}, which is no file in its folder; export it again")
        with path.open("rb") as stream:
            digests.append(file_digest(stream, "sha256").hexdigest())
    return " ".join(digests)


def _external_files(message: Any) -> Iterator[str]:
    """Yield the names of external files that hold tensors of a graph."""
    for field, value in message.ListFields():
        if field.name == "external_data":
            yield from (entry.value for entry in value if entry.key == "location")
        elif field.message_type is not None:
            for submessage in value if field.is_repeated else [value]:
                yield from _external_files(submessage)
