"""Mixes of linear heads by the likelihood of validation samples."""

import torch

from fedvlm.maths.head_mixing import average_mixes, mix_grid, mix_losses
from fedvlm.maths.logistic_regression import split_head


def made(n_samples=60):
    draw = torch.Generator().manual_seed(0)
    heads = torch.randn(4, 3, 6, generator=draw)
    x = torch.randn(n_samples, 5, generator=draw)
    return heads, x, split_head(heads[1]).logits(x).argmax(1)


def test_losses_are_those_of_the_mixed_heads():
    heads, x, y = made()
    losses = mix_losses(heads[:2], heads[2:], x, y)
    grid = mix_grid(2)
    assert losses.shape == (2, len(grid))
    mixed = torch.einsum("j,jcd->cd", grid[70].float(), heads[[1, 2, 3]])
    expected = torch.nn.functional.cross_entropy(split_head(mixed).logits(x), y, reduction="sum")
    assert torch.allclose(losses[1, 70], expected, rtol=1e-4)


def test_the_likeliest_candidate_gets_nearly_all_weight():
    heads, x, y = made(2000)
    losses = mix_losses(heads[:2], heads[2:], x, y)
    mixed = average_mixes(heads[:2], heads[2:], losses)
    assert torch.nn.functional.cosine_similarity(mixed.flatten(), heads[1].double().flatten(), dim=0) > 0.95


def test_the_order_of_candidates_does_not_matter_and_none_need_be_mixed_in():
    heads, x, y = made()
    none = heads[:0]
    a = average_mixes(heads, none, mix_losses(heads, none, x, y))
    b = average_mixes(heads.flip(0), none, mix_losses(heads.flip(0), none, x, y))
    assert torch.allclose(a, b, atol=1e-6)
