"""CLIP with a ResNet: our forward is that of plain modules with the same weights."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from fedvlm.core import make
from fedvlm.encoders import fingerprint, open_encoder
from fedvlm.errors import EncoderError, SettingsError
from fedvlm.runner.load import check_needs
from fedvlm.runner.run import execute
from fedvlm.runner.settings import build
from tests.helpers import plain_resnet

CLASSES = ["cat", "dog", "alarm_clock"]
TEMPLATE = "a photo of a {}."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models") / "RN50"


@pytest.fixture(scope="module")
def plain(folder):
    return plain_resnet.save(folder)


@pytest.fixture(scope="module")
def encoder(plain, folder):
    return open_encoder(f"openai:{folder}")


def pixels(encoder, count=3):
    draw = np.random.default_rng(0)
    some = [draw.integers(0, 256, (70 + 9 * n, 90, 3), np.uint8) for n in range(count)]
    return [encoder.preprocess(Image.fromarray(array)) for array in some]


@pytest.mark.parametrize("shape", [{}, {"blocks": (1, 2, 3, 1), "width": 6, "edge": 3, "dim": 40}])
def test_images_and_patches_are_those_of_plain_modules(tmp_path, shape):
    plain = plain_resnet.save(tmp_path, seed=1, **shape)
    encoder = open_encoder(f"openai:{tmp_path}")
    batch = pixels(encoder)
    expected = plain.visual(torch.tensor(np.stack(batch)))
    vectors = encoder.embed(batch, patches=True)
    assert batch[0].shape == (3, encoder.preprocess.size, encoder.preprocess.size)
    assert vectors.pooled.shape == (3, shape.get("dim", 24))
    assert vectors.patches.shape[1] == shape.get("edge", 2) ** 2
    np.testing.assert_allclose(vectors.pooled, expected[:, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(vectors.patches, expected[:, 1:], rtol=2e-3, atol=2e-3)
    alone = encoder.embed(batch, patches=False)
    np.testing.assert_allclose(alone.pooled, vectors.pooled, rtol=1e-4, atol=1e-5)
    assert alone.patches is None
    assert encoder.scale == pytest.approx(np.exp(3.0))


def test_sentences_are_those_of_plain_modules(plain, encoder):
    sentences = ["a photo of a cat.", "dog", "a very long name"]
    features = encoder.embed_text(sentences)
    expected = torch.stack([plain.text(ids) for ids in encoder._tokens(sentences)])
    torch.testing.assert_close(features, normalize(expected, dim=-1), rtol=1e-4, atol=1e-5)


def test_the_template_through_the_text_tower_is_its_sentence(encoder):
    tower = encoder.text_tower(CLASSES, TEMPLATE)
    sentences = ["a photo of a cat.", "a photo of a dog.", "a photo of a alarm clock."]
    torch.testing.assert_close(tower(tower.prefix), encoder.embed_text(sentences), rtol=1e-4, atol=1e-5)


def test_a_prompt_has_a_gradient_through_the_text_tower(encoder):
    tower = encoder.text_tower(CLASSES, TEMPLATE)
    context = tower.prefix.clone().requires_grad_()
    tower(context)[0, 0].backward()
    assert context.grad.abs().sum() > 0


def test_without_a_tokenizer_it_offers_images_alone(tmp_path, plain, folder):
    (tmp_path / "RN.safetensors").write_bytes((folder / "w.safetensors").read_bytes())
    bare = open_encoder(f"openai:{tmp_path / 'RN.safetensors'}")
    assert bare.offers == {"image", "patches"}
    with pytest.raises(EncoderError, match="has no text; put CLIP's tokenizer.json into its folder"):
        bare.embed_text(["a cat"])
    with pytest.raises(SettingsError, match="promptfl needs text tower"):
        check_needs(make("promptfl"), bare.name, bare.offers)


def test_methods_that_train_an_image_tower_are_refused(encoder):
    assert encoder.offers == {"image", "patches", "text", "text tower"}
    with pytest.raises(SettingsError, match="needs image tower"):
        check_needs(make("vpt"), encoder.name, encoder.offers)


def test_a_sentence_that_is_too_long_is_refused(encoder):
    with pytest.raises(SettingsError, match="has 32 tokens, .* reads 24; shorten it"):
        encoder.embed_text([" ".join(["cat"] * 30)])


def test_the_fingerprint_follows_weights_and_words(tmp_path, encoder):
    plain_resnet.save(tmp_path / "same")
    plain_resnet.save(tmp_path / "other", seed=5)
    same, different = (open_encoder(f"openai:{tmp_path / name}") for name in ("same", "other"))
    assert fingerprint(same) == fingerprint(encoder) != fingerprint(different)
    words = json.loads((tmp_path / "same" / "tokenizer.json").read_text())
    words["model"]["vocab"]["zebra"] = words["model"]["vocab"].pop("cat")
    (tmp_path / "same" / "tokenizer.json").write_text(json.dumps(words))
    assert fingerprint(open_encoder(f"openai:{tmp_path / 'same'}")) != fingerprint(encoder)


@pytest.mark.parametrize(
    "key",
    [
        "visual.attnpool.q_proj.weight",
        "visual.layer2.0.bn3.running_var",
        "visual.layer3.0.conv1.weight",
        "visual.conv2.weight",
        "token_embedding.weight",
        "transformer.resblocks.1.mlp.c_fc.bias",
        "logit_scale",
    ],
)
def test_weights_that_lack_one_are_refused(tmp_path, key):
    plain_resnet.save(tmp_path)
    weights = load_file(tmp_path / "w.safetensors")
    del weights[key]
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(EncoderError, match="is not a CLIP model with a ResNet.*hf:openai/clip-vit"):
        open_encoder(f"openai:{tmp_path}")


def test_weights_of_another_shape_are_refused(tmp_path):
    plain_resnet.save(tmp_path)
    weights = load_file(tmp_path / "w.safetensors")
    weights["visual.attnpool.positional_embedding"] = torch.zeros(7, 128)
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(EncoderError, match="6 positions"):
        open_encoder(f"openai:{tmp_path}")


def test_a_folder_that_is_not_one_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(EncoderError, match="holds 0 .safetensors files; put the state dict"):
        open_encoder(f"openai:{tmp_path}")
    with pytest.raises(EncoderError, match="is not there"):
        open_encoder(f"openai:{tmp_path / 'RN50'}")
    (tmp_path / "RN50.pt").write_bytes(b"\x80\x04")
    with pytest.raises(EncoderError, match="a .pt is not read, because it may hold code"):
        open_encoder(f"openai:{tmp_path / 'RN50.pt'}")
    (tmp_path / "RN50.safetensors").write_bytes(b"nothing")
    with pytest.raises(EncoderError, match="cannot be read"):
        open_encoder(f"openai:{tmp_path}")
    plain_resnet.save(tmp_path / "whole")
    (tmp_path / "whole" / "tokenizer.json").write_text("{")
    with pytest.raises(EncoderError, match="tokenizer.json cannot be read"):
        open_encoder(f"openai:{tmp_path / 'whole'}")


def test_prompts_and_patches_of_a_resnet_go_through_a_run(encoder, folder, tmp_path):
    method = {"name": "fedotp", "rounds": 1, "local_epochs": 1, "ctx_init": "template"}
    values = {"method": method, "encoder": f"openai:{folder}", "protocol": "own-test"}
    done = execute(build({**values, "smoke": True, "clients": {"shots": 1}}), tmp_path / "run")
    (table,) = done.tables
    assert 0 <= table["own"] <= 1
    assert done.manifest["dim"] == 24
    assert done.manifest["template"] == "a picture of a {}"
