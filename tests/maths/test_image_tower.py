"""The image tower as a function of its weights."""

import numpy as np
import pytest
import torch

from fedvlm.encoders.huggingface import HuggingFace
from fedvlm.errors import SettingsError
from fedvlm.maths.image_tower import TARGETS
from tests.helpers import tiny_models

MAKERS = {
    "clip": tiny_models.clip,
    "siglip": tiny_models.siglip,
    "dinov2": lambda folder: tiny_models.vision(folder, "dinov2"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_the_tower_with_its_own_weights_gives_the_embeddings(tmp_path, kind):
    encoder = HuggingFace(MAKERS[kind](tmp_path))
    tower = encoder.image_tower()
    side = encoder.preprocess.crop[0] if encoder.preprocess.crop else 16
    pixels = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(0))
    official = encoder.embed(list(pixels.numpy()), patches=False).pooled
    assert np.allclose(tower(tower.weights, pixels).numpy(), official, atol=1e-6)
    assert not any("text" in key for key in tower.weights)

    def energy(weights):
        return tower(weights, pixels).square().sum()

    gradients = torch.func.grad(energy)(tower.weights)
    moved = [key for key, gradient in gradients.items() if gradient.abs().sum() > 0]
    assert len(moved) > len(gradients) / 2


def test_other_weights_leave_the_encoder_as_it_was(tmp_path):
    encoder = HuggingFace(tiny_models.clip(tmp_path))
    tower = encoder.image_tower()
    pixels = torch.zeros(1, 3, 16, 16)
    before = tower(tower.weights, pixels)
    changed = {key: value + 0.1 for key, value in tower.weights.items()}
    assert not torch.allclose(tower(changed, pixels), before)
    assert torch.equal(tower(tower.weights, pixels), before)


ALL = {**MAKERS, "vit": lambda folder: tiny_models.vision(folder, "vit")}


def opened(folder, kind):
    tower = HuggingFace(ALL[kind](folder)).image_tower()
    return tower, torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ALL)
def test_weights_left_out_are_the_encoders_own(tmp_path, kind):
    tower, pixels = opened(tmp_path, kind)
    some = {key: tower.weights[key] for key in tower.last(1)}
    assert 0 < len(some) < len(tower.weights)
    assert torch.equal(tower(some, pixels), tower(tower.weights, pixels))
    assert tower.last(0) == list(tower.weights)
    assert not any("embeddings" in key for key in tower.last(tower.blocks))


@pytest.mark.parametrize("kind", ALL)
def test_every_block_has_each_target_once(tmp_path, kind):
    tower, _ = opened(tmp_path, kind)
    for target in TARGETS:
        assert len(tower.matrices([target])) == tower.blocks == 2
    assert len(tower.matrices(list(TARGETS))) == 2 * len(TARGETS)
    with pytest.raises(SettingsError, match="target is called 'qq'"):
        tower.matrices(["qq"])


@pytest.mark.parametrize("kind", ALL)
def test_prompts_change_the_features_and_no_prompts_do_not(tmp_path, kind):
    tower, pixels = opened(tmp_path, kind)
    plain = tower(tower.weights, pixels)
    assert torch.equal(tower({}, pixels, torch.zeros(1, 0, tower.width)), plain)
    draw = torch.randn(2, 3, tower.width, generator=torch.Generator().manual_seed(1))
    shallow, deep = tower({}, pixels, draw[:1]), tower({}, pixels, draw)
    assert shallow.shape == deep.shape == plain.shape
    assert not torch.allclose(shallow, plain, atol=1e-4)
    assert not torch.allclose(shallow, deep, atol=1e-4)
    assert torch.equal(tower({}, pixels), plain)  # nothing is left behind
    gradient = torch.func.grad(lambda prompts: tower({}, pixels, prompts)[:, 0].sum())(draw)
    assert (gradient.abs().sum(dim=2) > 0).all()


def test_prompts_of_every_block_and_no_more(tmp_path):
    tower, pixels = opened(tmp_path, "clip")
    with pytest.raises(SettingsError, match="depth = 3; the image tower has 2 blocks"):
        tower({}, pixels, torch.zeros(3, 1, tower.width))
    with pytest.raises(SettingsError, match="blocks must be between 0 and 2, got 3"):
        tower.last(3)


def test_the_order_of_prompts_does_not_matter(tmp_path):
    """They have no position: a place among the tokens is none."""
    tower, pixels = opened(tmp_path, "clip")
    draw = torch.randn(1, 3, tower.width, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(tower({}, pixels, draw), tower({}, pixels, draw.flip(1)), atol=1e-6)
