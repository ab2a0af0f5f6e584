"""What clients keep to themselves in a run, for its owner."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.core import Method, setting
from fedvlm.errors import join_names


def suppressed_warnings(
    method: Method | None, members: Mapping[str, Any], labels: NDArray[np.int64], classes: int
) -> list[str]:
    """What stays at the clients because a class has too few rows there, for the run's owner."""
    min_samples = (method.traits.classes.min_class_samples if method else None) or 1
    if min_samples <= 1:
        return []
    counts = {id: np.bincount(labels[entry.train], minlength=classes) for id, entry in members.items()}
    small = {id: int(((entry > 0) & (entry < min_samples)).sum()) for id, entry in counts.items()}
    n_statistics = sum(int((entry > 0).sum()) for entry in counts.values())
    silent_clients = [id for id, entry in counts.items() if small[id] and (entry < min_samples).all()]
    if not sum(small.values()):
        return []
    message = (
        f"{sum(small.values())} of {n_statistics} class statistics are not uploaded: the client has fewer "
        f"than {min_samples} rows of the class"
    )
    if silent_clients:
        message += f"; no class statistics at all come from {join_names(silent_clients, 5)}"
    if 2 * sum(small.values()) <= n_statistics:
        return [f"{message}; --allow-small uploads them"]
    rows = sum(int(entry.sum()) for entry in counts.values())
    lost = sum(int(entry[entry < min_samples].sum()) for entry in counts.values())
    noise = (
        ", and with method.noise_multiplier = 1 besides under noise whose ε is counted"
        if method is not None and setting(method, "noise_multiplier") is not None
        else ""
    )
    return [
        f"MOST IS WITHHELD: {message}; so {lost} of {rows} training rows ({lost / rows:.0%}) are in "
        f"no class statistic that is uploaded; --allow-small uploads them as they are{noise}"
    ]
