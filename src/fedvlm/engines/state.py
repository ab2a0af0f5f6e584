"""What a training has learnt so far, and the plan it follows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from fedvlm.core import Method, Tensors
from fedvlm.engines.client import Local
from fedvlm.errors import SettingsError

POOLED = "pooled"  # the client that has everyone's rows, where a run asks for it
Selection = Literal["last", "validation", "oracle"]


@dataclass(frozen=True)
class Plan:
    """Who trains, who is only measured, and which round's state is kept."""

    train: tuple[str, ...]
    unseen: tuple[str, ...]
    fraction: float = 1.0  # of the training clients in each round
    selection: Selection = "last"


@dataclass(frozen=True)
class State:
    """All that a training has learnt; what is not in here is derived from the settings."""

    round: int  # rounds done
    shared: Tensors
    local: Mapping[str, Local]  # by client id, for clients that have taken part
    best: float = -1.0  # the chosen round's score
    best_round: int = 0
    best_shared: Tensors | None = None  # None: the current state is the chosen one
    best_local: Mapping[str, Local] | None = None
    channel: Mapping[str, Tensors] = field(default_factory=dict)  # what it keeps, by client id


def counted(method: Method, plan: Plan, state: State) -> State:
    """With the number of clients that may take part, where a method shares a tensor for it."""
    name = method.traits.clients
    if name is None:
        return state
    if name not in state.shared:
        raise SettingsError(
            f"method {method.name}: its traits say that {name!r} holds the number of clients, but "
            "init does not share such a tensor; add it"
        )
    count = torch.full_like(state.shared[name], len(plan.train))
    return replace(state, shared={**state.shared, name: count})
