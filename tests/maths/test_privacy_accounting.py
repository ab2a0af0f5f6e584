"""ε agrees with what is known in closed form, and moves the right way."""

import math
import sys
from itertools import pairwise

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from fedvlm.errors import SettingsError
from fedvlm.maths.privacy import epsilon


def delta_of_gaussian(epsilon, noise, steps):
    """δ(ε) of the Gaussian mechanism (Balle and Wang 2018, theorem 8)."""

    def below(z):
        return math.erfc(-z / math.sqrt(2)) / 2

    mu = math.sqrt(steps) / noise
    return below(mu / 2 - epsilon / mu) - math.exp(epsilon) * below(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (4.0, 10), (20.0, 500), (0.7, 3)])
def test_without_sampling_epsilon_is_the_gaussian_mechanisms_own(noise, steps):
    assert delta_of_gaussian(epsilon(noise, steps, 1.0, 1e-5), noise, steps) == pytest.approx(1e-5, rel=1e-6)


def test_sampled_epsilon_lies_between_the_tight_value_and_the_one_papers_print():
    """Noise 1.1, batches of 250 out of 60,000, 60 epochs: 2.92 by the first Rényi accountants."""
    tight = PLDAccountant()
    step = PoissonSampledDpEvent(250 / 60_000, GaussianDpEvent(1.1))
    tight.compose(SelfComposedDpEvent(step, 60 * 240))
    assert tight.get_epsilon(1e-5) < epsilon(1.1, 60 * 240, 250 / 60_000, 1e-5) < 2.92


@pytest.mark.parametrize("rate", [1.0, 0.9, 0.1, 0.01])
def test_epsilon_grows_with_steps_and_falls_with_noise(rate):
    by_steps = [epsilon(2.0, steps, rate) for steps in (1, 10, 100, 1000)]
    by_noise = [epsilon(noise, 100, rate) for noise in (0.5, 1.0, 4.0, 16.0)]
    assert all(a < b for a, b in pairwise(by_steps))
    assert all(a > b for a, b in pairwise(by_noise))


def test_sampling_never_costs_privacy():
    assert all(epsilon(1.0, 50, q) <= epsilon(1.0, 50, 1.0) for q in (0.01, 0.5, 0.99))


def test_smaller_delta_costs_more_epsilon():
    assert epsilon(3.0, 20, delta=1e-7) > epsilon(3.0, 20, delta=1e-5)


def test_no_noise_is_no_privacy_and_no_step_no_loss():
    assert epsilon(0.0, 1) == math.inf
    assert epsilon(0.0, 0) == epsilon(1.0, 0) == 0.0


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((-1.0, 5), "noise_multiplier must be at least 0, got -1.0"),
        ((math.nan, 5), "noise_multiplier must be finite and at least 0, got nan"),
        ((1.0, -5), "steps must be at least 0, got -5"),
        ((1.0, 5, 0.0), "sampling_rate must be above 0 and at most 1, got 0.0"),
        ((1.0, 5, 1.5), "sampling_rate must be above 0 and at most 1, got 1.5"),
        ((1.0, 5, 1.0, 0.0), "delta must be above 0 and below 1, got 0.0"),
        ((1.0, 5, 1.0, 1.0), "delta must be above 0 and below 1, got 1.0"),
    ],
)
def test_a_value_without_meaning_is_refused(values, word):
    with pytest.raises(SettingsError, match=word):
        epsilon(*values)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(SettingsError, match=r"fedvlm\[privacy\]"):
        epsilon(1.0, 5)
