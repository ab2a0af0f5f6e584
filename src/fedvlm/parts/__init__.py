"""Standard bodies a method names: `update = parts.sgd`, `aggregate = parts.mean`, ..."""

from fedvlm.parts import bodies, training
from fedvlm.parts.bodies import *  # noqa: F403
from fedvlm.parts.training import *  # noqa: F403

__all__ = [*bodies.__all__, *training.__all__]
