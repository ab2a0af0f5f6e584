import pickle

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from fedvlm.encoders import fingerprint, open_encoder
from fedvlm.encoders.huggingface import HuggingFace
from fedvlm.errors import EncoderError, SettingsError
from tests.helpers import tiny_models

SIZES = [(16, 16), (40, 30), (31, 97), (7, 9), (300, 5)]


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def images(encoder: HuggingFace) -> list[np.ndarray]:
    return [encoder.preprocess(image(20 + i, 30 - i, i)) for i in range(4)]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return HuggingFace(tiny_models.clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    return HuggingFace(tiny_models.siglip(tmp_path_factory.mktemp("siglip")))


@pytest.mark.parametrize(
    "processor",
    [
        CLIPImageProcessorPil(),
        CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": 33, "width": 16}),
        CLIPImageProcessorPil(do_rescale=False, do_normalize=False, do_resize=False),
        SiglipImageProcessorPil(size={"height": 17, "width": 23}),
        ViTImageProcessorPil(do_normalize=False),
    ],
    ids=["clip", "pad", "crop only", "siglip", "vit"],
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_equal_those_of_the_processor_bit_by_bit(tmp_path, processor, size):
    from fedvlm.encoders.huggingface import _pixels

    processor.save_pretrained(tmp_path)
    preprocess = _pixels(transformers, str(tmp_path), "clip", {"local_files_only": True})
    theirs = processor(image(*size), return_tensors="np")["pixel_values"][0]
    assert np.array_equal(preprocess(image(*size)), theirs.astype(np.float32))
    assert pickle.loads(pickle.dumps(preprocess)) == preprocess  # noqa: S301


def test_old_configs_with_a_plain_number_as_size_are_read(tmp_path):
    from fedvlm.encoders.huggingface import _pixels

    file = tmp_path / "preprocessor_config.json"
    file.write_text('{"feature_extractor_type": "CLIPFeatureExtractor", "size": 18, "crop_size": 16}')
    preprocess = _pixels(transformers, str(tmp_path), "clip", {"local_files_only": True})
    assert (preprocess.size, preprocess.crop) == (18, (16, 16))
    file.write_text('{"feature_extractor_type": "ViTFeatureExtractor", "size": 18}')
    preprocess = _pixels(transformers, str(tmp_path), "vit", {"local_files_only": True})
    assert (preprocess.size, preprocess.crop) == ((18, 18), None)


def test_clip_vectors_are_the_official_ones(clip):
    batch = images(clip)
    official = clip.model.get_image_features(pixel_values=torch.tensor(np.stack(batch)))
    answer = clip.embed(batch, patches=True)
    assert np.allclose(answer.pooled, official.pooler_output.numpy(), atol=1e-6)
    assert answer.patches is not None
    assert answer.patches.shape == (4, 16, clip.dim)
    assert answer.patches.dtype == np.float16
    assert clip.offers == {"image", "text", "patches", "text tower", "image tower"}
    assert clip.scale == pytest.approx(np.exp(2.6592), rel=1e-4)


def test_clip_patches_go_the_way_of_the_class_token(clip):
    """Put through the same norm and projection, the class token is the pooled embedding."""
    batch = torch.tensor(np.stack(images(clip)))
    hidden = clip.model.vision_model(pixel_values=batch).last_hidden_state
    pooled = clip._patches(hidden[:, :1])[:, 0]
    assert torch.allclose(pooled, clip._image(batch)[0], atol=1e-6)


def test_siglip_patch_of_a_picture_of_one_patch_is_its_pooled_embedding(tmp_path):
    encoder = HuggingFace(tiny_models.siglip(tmp_path, image=4))
    answer = encoder.embed(images(encoder), patches=True)
    assert answer.patches is not None
    assert np.allclose(answer.patches[:, 0], answer.pooled, atol=2e-3)


def test_siglip_text_is_padded_to_full_length_and_unit_norm(siglip):
    got = siglip.embed_text(["a cat", "a photo of a dog"])
    padded = siglip.tokenizer(["a cat", "a photo of a dog"], padding="max_length", max_length=12, return_tensors="pt")
    official = siglip.model.get_text_features(input_ids=padded["input_ids"]).pooler_output
    assert torch.allclose(got, torch.nn.functional.normalize(official, dim=1), atol=1e-6)
    assert siglip.offers == {"image", "text", "patches", "image tower"}
    with pytest.raises(EncoderError, match="use a CLIP model"):
        siglip.text_tower(["cat"], "a {}")


def test_text_does_not_depend_on_its_neighbours(clip):
    alone = clip.embed_text(["a cat"])
    in_batch = clip.embed_text(["a cat", "a photo of a very long name"])
    assert torch.allclose(alone[0], in_batch[0], atol=1e-6)
    assert torch.allclose(in_batch.norm(dim=1), torch.ones(2), atol=1e-6)


def test_a_sentence_past_the_tower_is_refused(clip):
    with pytest.raises(SettingsError, match="reads 24; shorten"):
        clip.embed_text(["a " * 30])


@pytest.mark.parametrize(("kind", "first"), [("vit", 1), ("deit", 2), ("dinov2", 1), ("dinov2_with_registers", 5)])
def test_vision_models_give_the_normed_class_token_and_patches(tmp_path, kind, first):
    encoder = HuggingFace(tiny_models.vision(tmp_path, kind))
    batch = images(encoder)
    hidden = encoder.model(pixel_values=torch.tensor(np.stack(batch))).last_hidden_state
    answer = encoder.embed(batch, patches=True)
    assert np.allclose(answer.pooled, hidden[:, 0].numpy(), atol=1e-6)
    assert answer.patches is not None
    assert answer.patches.shape[1] == 16
    assert np.allclose(answer.patches, hidden[:, first:].numpy(), atol=2e-3)
    assert encoder.offers == {"image", "patches", "image tower"}
    with pytest.raises(EncoderError, match="has no text"):
        encoder.embed_text(["a cat"])


def test_fingerprint_follows_weights_and_preprocessing_and_not_the_place(tmp_path):
    first = HuggingFace(tiny_models.clip(tmp_path / "one"))
    same = HuggingFace(tiny_models.clip(tmp_path / "same"))
    different = HuggingFace(tiny_models.clip(tmp_path / "other", seed=1))
    assert fingerprint(first) == fingerprint(same) != fingerprint(different)
    CLIPImageProcessorPil(size={"shortest_edge": 18}).save_pretrained(tmp_path / "same")
    assert fingerprint(HuggingFace(tmp_path / "same")) != fingerprint(first)


def test_nothing_trains(clip):
    assert not any(p.requires_grad for p in clip.model.parameters())
    assert not clip.model.training
    assert {p.dtype for p in clip.model.parameters()} == {torch.float32}


def test_opening_is_silent(tmp_path, capfd):
    tiny_models.vision(tmp_path, "vit")
    capfd.readouterr()
    open_encoder(f"hf:{tmp_path}")
    assert capfd.readouterr() == ("", "")


def test_missing_directory_says_so(tmp_path):
    with pytest.raises(EncoderError, match="there is no directory"):
        open_encoder(f"hf:{tmp_path / 'nowhere'}")


def test_empty_directory_says_what_to_put_there(tmp_path):
    with pytest.raises(EncoderError, match=r"put config.json, model.safetensors"):
        open_encoder(f"hf:{tmp_path}")


def test_unreachable_hub_says_what_to_do(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EncoderError, match="check the name and the network"):
        open_encoder("hf:nobody/no-such-model")


def test_incomplete_weights_are_refused(tmp_path):
    tiny_models.clip(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EncoderError, match=r"lack visual_projection.weight"):
        open_encoder(f"hf:{tmp_path}")


def test_other_model_types_are_refused_by_name(tmp_path):
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(EncoderError, match="type 'bert'; supported types are clip, siglip"):
        open_encoder(f"hf:{tmp_path}")
