"""Standard bodies a method names: `update = parts.sgd`, `aggregate = parts.mean`, ..."""

from fedvlm.parts.bodies import (
    cross_entropy,
    everything,
    idle,
    masked_cross_entropy,
    mean,
    minibatch,
    nothing,
    uniform,
    withhold,
)
from fedvlm.parts.linear import head_sgd, map_sgd, pulled_sgd
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
    "cross_entropy",
    "descend",
    "each",
    "everything",
    "head_sgd",
    "idle",
    "join_state",
    "map_sgd",
    "masked_cross_entropy",
    "mean",
    "minibatch",
    "moments",
    "nothing",
    "pulled_sgd",
    "sgd",
    "sgd_step",
    "split_state",
    "uniform",
    "withhold",
]
