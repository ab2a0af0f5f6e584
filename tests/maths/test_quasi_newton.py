"""The server's quasi-Newton step goes down, whatever the clients say the curvature is."""

import pytest
import torch

from fedvlm.maths.logistic_regression import start_state, take_quasi_newton_step


@pytest.mark.parametrize("lie", [0.0, 0.5, 2.0, 30.0])
def test_a_step_from_curvature_that_is_none_still_goes_down(lie):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=draw, dtype=torch.float64)
    second_factor = torch.randn(8, 6, generator=draw, dtype=torch.float64)
    gram = x.mT @ x / 40 - lie * second_factor.mT @ second_factor / 8
    assert (torch.linalg.eigvalsh(gram).min() < 0) == (lie > 0)
    gradient = torch.randn(3, 6, generator=draw, dtype=torch.float64)
    start = start_state(torch.zeros(3, 6))
    loss = torch.ones((), dtype=torch.float64)
    step = take_quasi_newton_step(start, loss, gradient, gram, torch.zeros(3, 6, dtype=torch.float64), 1e-6).point
    assert step.isfinite().all() and (step * gradient).sum() < 0
