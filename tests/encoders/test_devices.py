"""No encoder mixes devices: shown on the meta device, since no GPU is at hand."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from fedvlm import devices
from fedvlm.devices import to_device
from fedvlm.encoders import BATCH, encoders, open_encoder, torch_encoder
from fedvlm.errors import EncoderError
from fedvlm.maths.text_tower import TextTower
from tests.helpers import plain_resnet, tiny_models
from tests.helpers.one_device import META, OneDevice

VISION = ("vit", "deit", "dinov2", "dinov2_with_registers")
SMALL = ("demo", "clip", "siglip", *VISION, "openai")
# Kinds of encoders whose work torch does not do, and who does it.
ELSEWHERE = {"http": "a server", "onnx": "onnxruntime on the CPU", "store": "done before"}
WORDS = ["a cat", "a very long dog"]


def test_every_kind_of_encoder_is_tested_or_computes_elsewhere():
    separate = {"open_clip", "timm"}  # tested in an environment of their own: test_open_clip_timm.py
    assert set(encoders()) == {"demo", "hf", "openai", *separate, *ELSEWHERE}


@pytest.fixture
def opened(tmp_path):
    def small(kind):
        if kind == "demo":
            return open_encoder(kind)
        if kind == "openai":
            plain_resnet.save(tmp_path)
            return open_encoder(f"openai:{tmp_path}")
        if kind in VISION:
            tiny_models.vision(tmp_path, kind)
        else:
            getattr(tiny_models, kind)(tmp_path)
        return open_encoder(f"hf:{tmp_path}")

    return small


def pixels_for(encoder, count=2):
    shape = (count, 3, *encoder._side())
    return list(np.random.default_rng(0).normal(size=shape).astype(np.float32))


def put_on_meta(encoder, monkeypatch):
    encoder.device, encoder.half = META, True
    encoder.halved = nullcontext  # autocast knows no meta device
    if hasattr(encoder, "model"):
        encoder.model.to(META)
        return
    # Where sentences end is looked up by value when a tower is made: it is found before.
    tower = encoder._tower("{}", encoder._tokens(WORDS), 1)
    monkeypatch.setattr(TextTower, "_tokens", to_device(tower._tokens, META))
    encoder._weights, encoder._visual = to_device((encoder._weights, encoder._visual), META)


@pytest.mark.parametrize("kind", SMALL)
def test_no_encoder_mixes_devices(kind, opened, monkeypatch):
    encoder = opened(kind)
    batch = pixels_for(encoder)
    work = [partial(encoder.embed, batch, patches) for patches in (False, True)]
    if "text" in encoder.offers:
        work.append(partial(encoder.embed_text, WORDS))
    put_on_meta(encoder, monkeypatch)
    for call in work:
        # Everything is done there; only what meta tensors have not, values, cannot be brought back.
        with (
            OneDevice(),
            pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"),
        ):
            call()


@pytest.mark.parametrize("kind", ["clip", "siglip", "vit", "dinov2"])
def test_an_image_tower_goes_to_a_device_and_its_model_stays(kind, opened):
    encoder = opened(kind)
    tower, pixels = encoder.image_tower(), torch.tensor(np.stack(pixels_for(encoder)))
    moved_tower = tower.to(META)
    with OneDevice():
        output = moved_tower({}, pixels.to(META))
    assert output.device == META and {weight.device for weight in moved_tower.weights.values()} == {META}
    assert torch.equal(tower({}, pixels), tower.to(devices.CPU)({}, pixels))


def test_towers_of_an_encoder_on_a_gpu_are_given_on_the_cpu(opened, monkeypatch):
    encoder = opened("clip")
    encoder.half = True
    targets = []
    monkeypatch.setattr("fedvlm.maths.image_tower.ImageTower.to", lambda self, to: targets.append(to))
    encoder.image_tower()
    assert targets == [devices.CPU] and {"image tower", "text tower"} <= encoder.offers
    text = encoder.text_tower(["cat", "dog"], "a photo of a {}.")
    tensors = [tensor for tensor in tree_leaves(vars(text)) if isinstance(tensor, torch.Tensor)]
    assert {tensor.device for tensor in tensors} == {devices.CPU}


@pytest.mark.parametrize("kind", ["demo", "siglip", "vit", "openai"])
def test_an_encoder_in_half_precision_is_close_and_gives_float32(kind, opened):
    encoder = opened(kind)
    batch = pixels_for(encoder)
    text = "text" in encoder.offers
    assert encoder.identity["dtype"] == encoder.dtype == "float32"
    plain, words = encoder.embed(batch, True), encoder.embed_text(WORDS) if text else None
    encoder.half = True
    float16, float16_text = encoder.embed(batch, True), encoder.embed_text(WORDS) if text else None
    assert encoder.dtype == "float16" and float16.pooled.dtype == np.float32
    pairs = [(plain.pooled, float16.pooled), (plain.patches, float16.patches)]
    if text:
        assert float16_text.dtype == torch.float32
        pairs.append((words, float16_text))
    for a, b in pairs:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert 0 < np.abs(a - b).max() < 0.02 * np.abs(a).max()


def test_large_linear_layers_by_onednn_differ_by_rounding_and_small_ones_not_at_all(opened, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 512, generator=generator)
    large, small = (torch.randn(width, 512, generator=generator) for width in (512, 511))
    for bias in (None, torch.ones(512)):
        exact = torch.nn.functional.linear(x.double(), large.double(), None if bias is None else bias.double())
        with torch_encoder.OneDnnLinear():
            computed = torch.nn.functional.linear(x, large, bias)
        assert not torch.equal(computed, torch.nn.functional.linear(x, large, bias)) or not torch_encoder.has_slow_mkl()
        torch.testing.assert_close(computed.double(), exact, rtol=1e-4, atol=1e-4)
    with torch_encoder.OneDnnLinear():
        assert torch.equal(torch.nn.functional.linear(x, small, None), x @ small.T)
    encoder = opened("vit")
    batch = pixels_for(encoder)
    monkeypatch.setattr(torch_encoder, "has_slow_mkl", lambda: False)
    assert isinstance(encoder.halved(), torch.autocast)
    plain = encoder.embed(batch, True)
    monkeypatch.setattr(torch_encoder, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(torch_encoder, "MIN_ONEDNN_WEIGHTS", 1)
    assert isinstance(encoder.halved(), torch_encoder.OneDnnLinear)
    np.testing.assert_allclose(encoder.embed(batch, True).pooled, plain.pooled, rtol=1e-4, atol=1e-5)


def test_on_a_gpu_the_dtype_is_half_and_never_bfloat16(monkeypatch):
    monkeypatch.setattr(torch_encoder, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch_encoder, "set_deterministic", lambda: None)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: (args, kwargs))
    encoder = torch_encoder.TorchEncoder("cuda")
    assert encoder.half and encoder.dtype == "float16"
    assert encoder.halved() == (("cuda", torch.float16), {"enabled": True})


def test_a_batch_follows_the_free_memory_of_a_gpu_and_never_that_of_the_cpu(opened, monkeypatch):
    encoder = opened("vit")
    bytes_per_image = encoder._bytes_per_image
    monkeypatch.setattr(torch_encoder, "free_device_memory", lambda device: 2 * 12 * bytes_per_image)
    assert encoder.batch == BATCH
    encoder.device = META
    assert encoder.batch == 8
    for room, expected in ((0, 1), (bytes_per_image, 1), (1 << 50, torch_encoder.MAX_GPU_BATCH), (None, BATCH)):
        monkeypatch.setattr(torch_encoder, "free_device_memory", lambda device, room=room: room)
        assert encoder.batch == expected


@pytest.mark.parametrize("kind", ["clip", "openai"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("out of memory")])
def test_a_batch_that_does_not_fit_is_halved(kind, error, opened, monkeypatch):
    encoder = opened(kind)
    batch = pixels_for(encoder, 5)
    plain, sizes, of = encoder.embed(batch, True), [], encoder._vectors

    def tight(pixels, patches):
        sizes.append(len(pixels))
        if len(pixels) > 2:
            raise error
        return of(pixels, patches)

    monkeypatch.setattr(encoder, "_vectors", tight)
    vectors = encoder.embed(batch, True)
    assert sizes == [5, 2, 3, 1, 2]
    np.testing.assert_allclose(vectors.pooled, plain.pooled, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(vectors.patches, plain.patches, rtol=1e-2, atol=1e-2)

    def never(pixels, patches):
        raise error

    monkeypatch.setattr(encoder, "_vectors", never)
    with pytest.raises(EncoderError, match="not enough memory for one image on cpu"):
        encoder.embed(batch, True)


def test_a_model_that_finds_no_memory_is_not_called_unfit(opened, monkeypatch):
    encoder = opened("clip")

    def full(**kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(encoder.model, "get_image_features", full)
    with pytest.raises(EncoderError, match="not enough memory for one image"):
        encoder.embed(pixels_for(encoder), False)


def test_the_mode_refuses_what_meta_alone_lets_pass():
    with OneDevice(), pytest.raises(AssertionError, match="mixes"):
        torch.zeros(2, 3, device=META) @ torch.zeros(3, 2)
    with OneDevice(), pytest.raises(AssertionError, match="draws on"), META:
        torch.rand(2, generator=torch.Generator())
