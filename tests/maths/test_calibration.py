"""Temperatures end where confidence is accuracy, and the fused weight is a/(a + b)."""

import pytest
import torch

from fedvlm.maths import calibration


def made(rows=200, classes=6, sure=3.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (rows,), generator=draw)
    logits = torch.randn(rows, classes, generator=draw).double()
    logits[torch.arange(rows), y] += sure
    return logits, y


@pytest.mark.parametrize("size", [0.1, 1.0, 40.0])
def test_confidence_becomes_accuracy_whatever_the_scale_of_the_logits(size):
    logits, y = made()
    log_temperature = calibration.fit_log_temperature(size * logits, y)
    sure = (size * logits / log_temperature.exp()).softmax(1).amax(1).mean().item()
    assert sure == pytest.approx((logits.argmax(1) == y).double().mean().item(), abs=1e-4)


@pytest.mark.parametrize("right", [True, False])
def test_perfect_and_hopeless_scores_end_at_a_finite_temperature(right):
    logits, y = made(sure=9.0 if right else -9.0)
    log_temperature = calibration.fit_log_temperature(logits, y)
    assert log_temperature.isfinite()
    sure = (logits / log_temperature.exp()).softmax(1).amax(1).mean().item()
    assert sure == pytest.approx(1 - 0.5 / 200 if right else 1 / 6 + 1e-3, abs=1e-3)


def test_padding_is_not_looked_at_and_no_rows_leave_the_temperature_at_one():
    logits, y = made()
    wide = torch.cat([logits, torch.full((9, 6), 50.0).double()])
    padded = torch.cat([y, torch.full((9,), -1)])
    assert calibration.fit_log_temperature(wide, padded) == calibration.fit_log_temperature(logits, y)
    assert calibration.fit_log_temperature(wide, torch.full_like(padded, -1)) == 0


def test_the_surer_classifier_weighs_more():
    p = torch.tensor([[0.7, 0.2, 0.1]])
    q = torch.tensor([[0.1, 0.4, 0.5]])
    weight = 0.7 / (0.7 + 0.5)
    fused = calibration.fuse_logits(p.log(), q.log()).exp()
    assert torch.allclose(fused, weight * p + (1 - weight) * q, atol=1e-6)
    assert torch.allclose(calibration.average_logits(p.log(), q.log()).exp(), (p + q) / 2, atol=1e-6)


def test_fused_shares_add_up_to_one_and_stay_finite_at_extremes():
    first, second = made(sure=500.0)[0].float(), made(seed=1, sure=-1e4)[0].float()
    fused = calibration.fuse_logits(first, second)
    assert fused.isfinite().all()
    assert torch.allclose(fused.exp().sum(1), torch.ones(200), atol=1e-5)
