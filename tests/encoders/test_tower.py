"""The image tower as a function of its weights."""

import numpy as np
import pytest
import tiny_models
import torch

from fedvlm.encoders.huggingface import HuggingFace

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

    slopes = torch.func.grad(energy)(tower.weights)
    moved = [key for key, slope in slopes.items() if slope.abs().sum() > 0]
    assert len(moved) > len(slopes) / 2


def test_other_weights_leave_the_encoder_as_it_was(tmp_path):
    encoder = HuggingFace(tiny_models.clip(tmp_path))
    tower = encoder.image_tower()
    pixels = torch.zeros(1, 3, 16, 16)
    before = tower(tower.weights, pixels)
    changed = {key: value + 0.1 for key, value in tower.weights.items()}
    assert not torch.allclose(tower(changed, pixels), before)
    assert torch.equal(tower(tower.weights, pixels), before)
