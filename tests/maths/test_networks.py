"""Gradient reversal, BatchNorm over real rows, and CLIP's loss keep their laws."""

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedvlm.maths.networks import Statistics, batch_norm, contrastive_loss, normalise, reverse_gradient


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def new_batch_norm(width):
    return Statistics(torch.zeros(width), torch.ones(width))


def test_reversal_keeps_the_values_and_flips_the_sign_of_the_gradient_exactly():
    x = draw(7, 5).requires_grad_()
    weight = draw(7, 5, seed=1)
    (plain,) = torch.autograd.grad((x.sin() * weight).sum(), x)
    (turned,) = torch.autograd.grad((reverse_gradient(x).sin() * weight).sum(), x)
    assert torch.equal(reverse_gradient(x), x)
    assert torch.equal(turned, -plain)


def test_batch_norm_is_torchs_own_on_the_real_rows():
    theirs = torch.nn.BatchNorm1d(6)
    with torch.no_grad():
        theirs.weight.copy_(draw(6, seed=2))
        theirs.bias.copy_(draw(6, seed=3))
    running = new_batch_norm(6)
    for step in range(3):
        x = 3 * draw(9, 6, seed=step) + 1
        padded = torch.cat([x, torch.full((4, 6), 99.0)])
        real = torch.arange(13) < 9
        expected = theirs(x)
        actual, running = batch_norm(padded, real, theirs.weight, theirs.bias, running)
        assert torch.allclose(actual[:9], expected, atol=1e-5)
    assert torch.allclose(running.mean, theirs.running_mean, atol=1e-6)
    assert torch.allclose(running.variance, theirs.running_var, atol=1e-5)
    theirs.eval()
    alone = normalise(x, theirs.weight, theirs.bias, running)
    assert torch.allclose(alone, theirs(x), atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_minibatch_of_one_row_goes_by_the_running_statistics_and_leaves_them(rows):
    running = Statistics(draw(4), draw(4, seed=1).exp())
    x = draw(5, 4, seed=2).requires_grad_()
    real = torch.arange(5) < rows
    actual, new = batch_norm(x, real, torch.ones(4), torch.zeros(4), running)
    assert torch.equal(actual, normalise(x, torch.ones(4), torch.zeros(4), running))
    assert torch.equal(new.mean, running.mean)
    assert torch.equal(new.variance, running.variance)
    (gradient,) = torch.autograd.grad(actual.square().sum(), x)
    assert gradient.isfinite().all()


def test_contrastive_loss_of_distinct_classes_is_clips():
    x, text = normalize(draw(6, 8), dim=1), normalize(draw(6, 8, seed=1), dim=1)
    y, real = torch.randperm(6, generator=torch.Generator().manual_seed(0)), torch.ones(6).bool()
    logits = 100 * x @ text[y].T
    target = torch.arange(6)
    clips = (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2
    for masked in (False, True):
        actual = contrastive_loss(x, text, y, real, 100.0, masked)
        assert torch.allclose(actual, clips, rtol=1e-6)


def test_padded_rows_have_no_say_in_the_contrastive_loss():
    x, text = normalize(draw(6, 8), dim=1), normalize(draw(3, 8, seed=1), dim=1)
    y, real = torch.tensor([0, 1, 2, 1, 0, 0]), torch.tensor([1, 1, 1, 1, 0, 0]).bool()
    part = contrastive_loss(x[:4], text, y[:4], real[:4], 10.0)
    assert torch.allclose(contrastive_loss(x, text, y, real, 10.0), part)


def test_without_a_real_row_the_contrastive_loss_and_its_gradient_are_zero():
    x = normalize(draw(3, 8), dim=1).requires_grad_()
    loss = contrastive_loss(x, draw(2, 8), torch.zeros(3).long(), torch.zeros(3).bool(), 10.0)
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss == 0
    assert not gradient.any()


def test_rows_of_one_class_put_a_floor_under_the_loss_that_masking_takes_away():
    """Two rows of each class: the loss cannot fall below log 2, however right they are."""
    text = torch.eye(4)
    y, real = torch.arange(8) % 4, torch.ones(8).bool()
    floor = contrastive_loss(text[y], text, y, real, 100.0)
    assert floor == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-5)
    assert contrastive_loss(text[y], text, y, real, 100.0, mask_duplicates=True) < 1e-5
