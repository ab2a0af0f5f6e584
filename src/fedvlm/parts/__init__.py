"""Standard bodies a method names: `update = parts.sgd`, `aggregate = parts.mean`, ..."""

from fedvlm.parts.bodies import (
    everything,
    fit,
    idle,
    mean,
    minibatch,
    misfit,
    nothing,
    uniform,
    withhold,
)
from fedvlm.parts.walk import (
    Stepper,
    adam,
    descend,
    each,
    join_state,
    moments,
    sgd,
    sgd_step,
    split_state,
)

__all__ = [
    "Stepper",
    "adam",
    "descend",
    "each",
    "everything",
    "fit",
    "idle",
    "join_state",
    "mean",
    "minibatch",
    "misfit",
    "moments",
    "nothing",
    "sgd",
    "sgd_step",
    "split_state",
    "uniform",
    "withhold",
]
