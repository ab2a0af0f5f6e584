"""What noise buys, by the `dp-accounting` library, and what a client keeps to itself."""

import math
from importlib import import_module
from typing import Any

from fedvlm.errors import SettingsError

# Whole orders only: fractional ones do not always converge, and say so on the terminal.
ORDERS = (*range(2, 65), *(2**k for k in range(7, 15)))


def spent(noise_multiplier: float, releases: int, delta: float) -> dict[str, float]:
    """For the record of a client: ε and δ of so many releases; nothing where there is no noise."""
    if not noise_multiplier:
        return {}
    return {"epsilon": epsilon(noise_multiplier, releases, delta=delta), "delta": delta}


def epsilon(noise_multiplier: float, steps: int, sampling_rate: float = 1.0, delta: float = 1e-5) -> float:
    """ε at `delta` of `steps` releases of a sum, each with noise of this multiple of the clip.

    The clip bounds what one member adds to a sum, and neighbours differ by one member more or
    less. `sampling_rate` is the chance with which each member is in a step, drawn anew and alone
    every time (Poisson); rows that are shuffled are not, and take the default 1, which assumes
    that every member is in every step. There it is the exact value, else a bound by Rényi
    divergences. Without noise it is infinite, without steps 0.
    """
    if not noise_multiplier >= 0 or steps < 0:
        raise SettingsError(
            f"a noise multiplier of {noise_multiplier} over {steps} steps has no ε; neither is negative"
        )
    if not 0 < delta < 1 or not 0 < sampling_rate <= 1:
        raise SettingsError(
            f"delta = {delta} lies between 0 and 1, and sampling_rate = {sampling_rate} is at "
            "most 1 and above 0; correct them (a usual delta is 1e-5)"
        )
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    try:
        dp: Any = import_module("dp_accounting")
        renyi: Any = import_module("dp_accounting.rdp")
    except ImportError as error:
        raise SettingsError("the privacy of noise is counted by dp-accounting; install fedvlm[privacy]") from error
    # Gaussians compose to one Gaussian whose noise is less by the root of their number.
    unsampled_epsilon = float(dp.get_epsilon_gaussian(noise_multiplier / math.sqrt(steps), delta))
    if sampling_rate == 1:
        return unsampled_epsilon
    step = dp.PoissonSampledDpEvent(sampling_rate, dp.GaussianDpEvent(noise_multiplier))
    accountant = renyi.RdpAccountant(ORDERS)
    accountant.compose(dp.SelfComposedDpEvent(step, steps))
    return min(unsampled_epsilon, float(accountant.get_epsilon(delta)))  # sampling never costs privacy
