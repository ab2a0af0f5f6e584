"""Standard bodies a method names: `update = parts.sgd`, `aggregate = parts.mean`, ..."""

from fedvlm.parts.bodies import (
    cross_entropy,
    masked_cross_entropy,
    mean,
    minibatch,
    no_adaptation,
    no_update,
    send_all,
    suppress_client_classes,
    uniform_mean,
)
from fedvlm.parts.linear import head_sgd, map_sgd, regularised_head_sgd
from fedvlm.parts.walk import (
    Stepper,
    adam,
    adam_moments,
    join_state,
    per_tensor,
    sgd,
    sgd_step,
    split_state,
    train_minibatches,
)

__all__ = [
    "Stepper",
    "adam",
    "adam_moments",
    "cross_entropy",
    "head_sgd",
    "join_state",
    "map_sgd",
    "masked_cross_entropy",
    "mean",
    "minibatch",
    "no_adaptation",
    "no_update",
    "per_tensor",
    "regularised_head_sgd",
    "send_all",
    "sgd",
    "sgd_step",
    "split_state",
    "suppress_client_classes",
    "train_minibatches",
    "uniform_mean",
]
