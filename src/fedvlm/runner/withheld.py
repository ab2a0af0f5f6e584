"""What clients keep to themselves in a run, for its owner."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.core import Method, setting
from fedvlm.errors import listing


def withheld(
    method: Method | None, members: Mapping[str, Any], labels: NDArray[np.int64], classes: int
) -> list[str]:
    """What stays at the clients because a class has too few rows there, for the run's owner."""
    least = (method.traits.min_class_samples if method else None) or 1
    if least <= 1:
        return []
    counts = {id: np.bincount(labels[one.train], minlength=classes) for id, one in members.items()}
    small = {id: int(((one > 0) & (one < least)).sum()) for id, one in counts.items()}
    held = sum(int((one > 0).sum()) for one in counts.values())
    silent = [id for id, one in counts.items() if small[id] and (one < least).all()]
    if not sum(small.values()):
        return []
    said = (
        f"{sum(small.values())} of {held} class statistics are not uploaded: the client has fewer "
        f"than {least} rows of the class"
    )
    if silent:
        said += f"; no class statistics at all come from {listing(silent, 5)}"
    if 2 * sum(small.values()) <= held:
        return [f"{said}; --allow-small uploads them"]
    rows = sum(int(one.sum()) for one in counts.values())
    lost = sum(int(one[one < least].sum()) for one in counts.values())
    noise = (
        ", and with method.noise_multiplier = 1 besides under noise whose ε is counted"
        if method is not None and setting(method, "noise_multiplier") is not None
        else ""
    )
    return [
        f"MOST IS WITHHELD: {said}; so {lost} of {rows} training rows ({lost / rows:.0%}) are in "
        f"no class statistic that is uploaded; --allow-small uploads them as they are{noise}"
    ]
