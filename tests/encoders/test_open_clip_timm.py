"""Encoders of open_clip and timm equal what the libraries themselves compute, with small random models.

Both libraries need torchvision, which is not in the development environment: `make test-encoders` has one of its own.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn.functional import normalize

import fedvlm
from fedvlm.encoders import fingerprint, open_encoder
from fedvlm.errors import EncoderError

HAS_LIBRARIES = all(importlib.util.find_spec(name) for name in ("open_clip", "timm", "torchvision"))
needs_libraries = pytest.mark.skipif(not HAS_LIBRARIES, reason="open_clip and timm: make test-encoders")


@pytest.fixture(scope="module", autouse=True)
def _torchvision() -> None:
    """Define the operators of a torchvision that was built for another torch, so that it can be imported."""
    if not HAS_LIBRARIES:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library  # its operators live as long as it does


def draw_images(count: int = 3) -> list[Image.Image]:
    generator = np.random.default_rng(0)
    sizes = [(61, 48), (50, 77), (40, 40), (47, 33)]
    return [
        Image.fromarray(generator.integers(0, 256, (*sizes[number % 4], 3), dtype=np.uint8)) for number in range(count)
    ]


VISION = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
TEXT = {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}


def write_open_clip(folder: Path, *, vision: dict | None = None, text: dict | None = None, **model: object) -> Path:
    import open_clip

    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    config = {"embed_dim": 16, "vision_cfg": vision or VISION, "text_cfg": text or TEXT, **model}
    preprocess = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3], "interpolation": "bicubic"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}))
    options = {}
    if "hf_model_name" in config["text_cfg"]:
        options = {"text_cfg": {**config["text_cfg"], "hf_model_name": str(folder), "hf_model_pretrained": False}}
    network = open_clip.create_model(f"local-dir:{folder}", load_weights=False, pretrained_text=False, **options)
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, folder / "model.safetensors")
    return folder


def write_timm(folder: Path, architecture: str, **cfg: object) -> Path:
    import timm

    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    arguments = {"img_size": 32, "depth": 2} if architecture.startswith("vit") else {}
    network = timm.create_model(architecture, pretrained=False, num_classes=0, **arguments)
    pretrained = {"input_size": [3, 32, 32], "crop_pct": 0.9, "interpolation": "bilinear", "num_classes": 0, **cfg}
    pretrained |= {"mean": [0.5, 0.4, 0.3], "std": [0.5, 0.4, 0.3]}
    config = {"architecture": architecture, "num_classes": 0, "model_args": arguments, "pretrained_cfg": pretrained}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, folder / "model.safetensors")
    return folder


@needs_libraries
@pytest.mark.parametrize("pool", ["tok", "avg"])
def test_open_clip_images_and_text_equal_the_library(tmp_path: Path, pool: str) -> None:
    import open_clip

    folder = write_open_clip(tmp_path / "model", vision={**VISION, "pool_type": pool})
    encoder = open_encoder(f"open_clip:{folder}")
    model, transform = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    pixels = [encoder.preprocess(image) for image in draw_images(4)]
    for image, array in zip(draw_images(4), pixels, strict=True):
        assert np.array_equal(transform(image).numpy(), array)
    vectors = encoder.embed(pixels, True)
    with torch.inference_mode():
        assert np.allclose(vectors.pooled, model.encode_image(torch.from_numpy(np.stack(pixels))).numpy(), atol=1e-5)
        text = model.encode_text(tokenizer(["a photo of a cat", "an X-ray"]))
    assert vectors.patches is not None and vectors.patches.shape == (4, 16, 16)
    if pool == "avg":  # the mean of what pooling returns per patch is the pooled embedding: norm comes before the mean
        assert np.allclose(vectors.patches.astype(np.float32).mean(1), vectors.pooled, atol=2e-2)
    assert torch.allclose(encoder.embed_text(["a photo of a cat", "an X-ray"]), normalize(text, dim=-1), atol=1e-5)
    assert encoder.scale == pytest.approx(model.logit_scale.exp().item())
    assert encoder.offers == {"image", "text", "patches", "text tower"}


@needs_libraries
def test_text_tower_with_the_template_as_context_equals_embed_text(tmp_path: Path) -> None:
    for name, model in (("plain", {}), ("custom", {"custom_text": True}), ("quick", {"quick_gelu": True})):
        encoder = open_encoder(f"open_clip:{write_open_clip(tmp_path / name, **model)}")
        tower = encoder.text_tower(["cat", "polar bear"], "a photo of a {}.")
        expected = encoder.embed_text(["a photo of a cat.", "a photo of a polar bear."])
        assert torch.allclose(normalize(tower.encode(tower.prefix), dim=-1), expected, atol=1e-5)


@needs_libraries
def test_biomedclip_style_folder_loads_without_the_hub(tmp_path: Path) -> None:
    import open_clip
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, PreTrainedTokenizerFast

    folder = tmp_path / "biomed"
    folder.mkdir()
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "chest", "film", "of", "effusion", "a"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    ).save_pretrained(folder)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32}
    BertConfig(vocab_size=len(words), hidden_size=16, pad_token_id=0, **sizes).save_pretrained(folder)
    name = "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract"
    text = {
        "hf_model_name": name,
        "hf_tokenizer_name": name,
        "proj": "mlp",
        "pooler_type": "cls_last_hidden_state_pooler",
        "context_length": 12,
    }
    text["hf_proj_type"] = text.pop("proj")
    text["hf_pooler_type"] = text.pop("pooler_type")
    vision = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "", "timm_proj": "linear", "image_size": 224}
    encoder = open_encoder(f"open_clip:{write_open_clip(folder, vision=vision, text=text)}")
    local = {**text, "hf_model_name": str(folder), "hf_model_pretrained": False}
    model = open_clip.create_model(f"local-dir:{folder}", text_cfg=local).eval()
    ids = open_clip.get_tokenizer(f"local-dir:{folder}")(["a chest film of effusion"])
    with torch.inference_mode():
        expected = normalize(model.encode_text(ids), dim=-1)
        pixels = torch.from_numpy(np.stack([encoder.preprocess(image) for image in draw_images(2)]))
        pooled = model.encode_image(pixels).numpy()
    assert torch.allclose(encoder.embed_text(["a chest film of effusion"]), expected, atol=1e-5)
    vectors = encoder.embed(list(pixels.numpy()), True)
    assert np.allclose(vectors.pooled, pooled, atol=1e-5)
    assert vectors.patches is not None and vectors.patches.shape == (2, 196, 16)
    assert "text tower" not in encoder.offers
    with pytest.raises(Exception, match="tokens"):
        encoder.embed_text(["chest " * 30])


@needs_libraries
@pytest.mark.parametrize("architecture", ["vit_tiny_patch16_224", "resnet10t", "convnext_atto"])
def test_timm_images_equal_the_library(tmp_path: Path, architecture: str) -> None:
    import timm

    folder = write_timm(tmp_path / "model", architecture)
    encoder = open_encoder(f"timm:{folder}")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model), is_training=False)
    pixels = [encoder.preprocess(image) for image in draw_images(4)]
    for image, array in zip(draw_images(4), pixels, strict=True):
        assert np.array_equal(transform(image).numpy(), array)
    vectors = encoder.embed(pixels, True)
    with torch.inference_mode():
        expected = model(torch.from_numpy(np.stack(pixels))).numpy()
    assert np.allclose(vectors.pooled, expected, atol=1e-4)
    assert encoder.dim == expected.shape[1] and encoder.offers == {"image", "patches"}
    assert vectors.patches is not None and vectors.patches.shape[2] == encoder.dim
    assert np.isfinite(vectors.patches).all()
    if architecture == "resnet10t":  # pooled by a plain mean
        assert np.allclose(vectors.patches.astype(np.float32).mean(1), vectors.pooled, atol=1e-2)


@needs_libraries
def test_fingerprint_follows_weights_and_preprocessing(tmp_path: Path) -> None:
    first = fingerprint(open_encoder(f"timm:{write_timm(tmp_path / 'a', 'vit_tiny_patch16_224')}"))
    assert first == fingerprint(open_encoder(f"timm:{write_timm(tmp_path / 'b', 'vit_tiny_patch16_224')}"))
    other = write_timm(tmp_path / "c", "vit_tiny_patch16_224", interpolation="bicubic")
    assert first != fingerprint(open_encoder(f"timm:{other}"))


@needs_libraries
@pytest.mark.parametrize("kind", ["open_clip", "timm"])
def test_half_precision_is_close_and_gives_float32(tmp_path: Path, kind: str) -> None:
    write = write_open_clip if kind == "open_clip" else lambda folder: write_timm(folder, "vit_tiny_patch16_224")
    encoder = open_encoder(f"{kind}:{write(tmp_path / 'model')}")
    pixels = [encoder.preprocess(image) for image in draw_images(2)]
    plain = encoder.embed(pixels, True)
    encoder.half = True
    half = encoder.embed(pixels, True)
    assert half.pooled.dtype == np.float32
    assert 0 < np.abs(half.pooled - plain.pooled).max() < 0.02 * np.abs(plain.pooled).max()


@needs_libraries
def test_a_run_on_images_with_open_clip(tmp_path: Path) -> None:
    folder = write_open_clip(tmp_path / "model")
    generator = np.random.default_rng(1)
    for domain in ("north", "south"):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / "images" / domain / name).mkdir(parents=True)
            for index in range(12):
                pixels = generator.integers(100 * number, 100 * number + 100, (36, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / domain / name / f"{index}.png")
    result = fedvlm.run(
        {"name": "promptfl", "rounds": 1},
        data=str(tmp_path / "images"),
        encoder=f"open_clip:{folder}",
        protocol="own-test",
        out=tmp_path / "out",
    )
    assert result.tables


@needs_libraries
@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("open_clip", {"resize_mode": "longest"}, "resize_mode 'longest'"),
        ("open_clip", {"interpolation": "sinc"}, "'sinc'"),
        ("timm", {"crop_mode": "border"}, "crop_mode 'border'"),
    ],
)
def test_preprocessing_that_cannot_be_reproduced_is_refused(
    tmp_path: Path, name: str, change: dict, match: str
) -> None:
    if name == "timm":
        folder = write_timm(tmp_path / "model", "vit_tiny_patch16_224", **change)
    else:
        folder = write_open_clip(tmp_path / "model")
        file = folder / "open_clip_config.json"
        config = json.loads(file.read_text())
        config["preprocess_cfg"] |= change
        file.write_text(json.dumps(config))
    with pytest.raises(EncoderError, match=match):
        open_encoder(f"{name}:{folder}")


@needs_libraries
def test_missing_weights_and_unknown_names_are_refused(tmp_path: Path) -> None:
    folder = write_open_clip(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(EncoderError, match="cannot be opened"):
        open_encoder(f"open_clip:{folder}")
    with pytest.raises(EncoderError, match="NAME@TAG"):
        open_encoder("open_clip:ViT-B-32")
    with pytest.raises(EncoderError, match="cannot be opened"):
        open_encoder("open_clip:ViT-B-3@laion2b")
    with pytest.raises(EncoderError, match="cannot be opened"):
        open_encoder("timm:no_such_model")
    with pytest.raises(EncoderError, match="there is no directory"):
        open_encoder("timm:./nowhere")


@pytest.mark.skipif(HAS_LIBRARIES, reason="open_clip and timm are installed")
@pytest.mark.parametrize("name", ["open_clip", "timm"])
def test_missing_libraries_are_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(EncoderError, match=rf"pip install 'fedvlm\[{name}\]'"):
        open_encoder(f"{name}:{tmp_path}")
