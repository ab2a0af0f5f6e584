"""What a training has learnt so far, and the plan it follows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from fedvlm.core import Method, Tensors
from fedvlm.engines.client import Kept, Local, Scores, here
from fedvlm.errors import SettingsError
from fedvlm.evaluate.scores import accuracy
from fedvlm.storage.shelf import Shelf
from fedvlm.tensors import count_bytes

PLACES = "places"  # where a shelf has what the state knows
POOLED = "pooled"  # the client that has everyone's rows, where a run asks for it
SHELVED = 64 << 20  # bytes of all clients' local tensors above which they are kept on disk
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


def chooses(method: Any, plan: Plan) -> bool:
    """Whether there are rounds to choose between; a method of one exchange is not without it."""
    return plan.selection != "last" and method.rounds > 1


def choose(plan: Plan, state: State, scores: Mapping[str, Scores]) -> State:
    """Keeps the state if it scores better than every one before it, as the selection says."""
    if plan.selection == "validation":
        score = accuracy(scores, plan.train, "validation") or 0.0
    else:
        score = accuracy(scores, {*plan.train, *plan.unseen}, "test") or 0.0
    if score <= state.best:
        return state
    return replace(
        state,
        best=score,
        best_round=state.round,
        best_shared=state.shared,
        best_local=dict(state.local),
    )


def shelves(plan: Plan, fresh: Local) -> bool:
    """Whether local tensors are on disk: if they are many, and none of a best round is kept."""
    if isinstance(fresh, Kept) or plan.selection != "last":
        return False
    return count_bytes(fresh) * len(plan.train) > SHELVED


def after(local: Mapping[str, Local], new: Mapping[str, Local]) -> Mapping[str, Local]:
    """What all clients have once these have trained."""
    if not isinstance(local, Shelf):
        return {**local, **new}
    local.put({id: here(one) for id, one in new.items()})
    return local


def pack(state: State) -> tuple[Tensors, dict[str, Any]]:
    """A state as flat tensors, with the names of clients and tensors kept apart.

    Of local tensors that are at their clients there are only versions, of those on a shelf only
    their places, which from now on stay as they are.
    """
    shelf = state.local if isinstance(state.local, Shelf) else None
    local = {
        "local": {} if shelf is not None else state.local,
        "best_local": state.best_local or {},
    }
    groups: dict[str, Mapping[str, Tensors]] = {
        "shared": {"": state.shared},
        "best_shared": {"": state.best_shared or {}},
        "channel": state.channel,
    }
    for group, by in local.items():
        groups[group] = {id: one for id, one in by.items() if not isinstance(one, Kept)}
    flat: Tensors = {} if shelf is None else {PLACES: shelf.mark()}
    index: dict[str, list[tuple[str, str]]] = {}
    for group, by_id in groups.items():
        index[group] = [(id, key) for id, one in by_id.items() for key in one]
        for number, (id, key) in enumerate(index[group]):
            flat[f"{group}/{number}"] = by_id[id][key]
    about = {
        "round": state.round,
        "best": state.best,
        "best_round": state.best_round,
        "chosen": state.best_shared is not None,
        "ids": {key: list(groups[key]) for key in ("local", "best_local", "channel")},
        "versions": {
            group: {id: one.version for id, one in by.items() if isinstance(one, Kept)}
            for group, by in local.items()
        },
        "index": index,
    }
    return flat, about


def unpack(flat: Tensors, about: Mapping[str, Any], shelf: Shelf | None = None) -> State:
    def group(name: str) -> dict[str, Tensors]:
        out: dict[str, Tensors] = {id: {} for id in about["ids"].get(name, [""])}
        for number, (id, key) in enumerate(about["index"][name]):
            out[id][key] = flat[f"{name}/{number}"]
        return out

    def local(name: str) -> dict[str, Local]:
        return {**group(name), **{id: Kept(one) for id, one in about["versions"][name].items()}}

    chosen = about["chosen"]
    if shelf is not None:
        shelf.back_to(flat[PLACES])
    return State(
        about["round"],
        group("shared")[""],
        local("local") if shelf is None else shelf,
        about["best"],
        about["best_round"],
        group("best_shared")[""] if chosen else None,
        local("best_local") if chosen else None,
        group("channel"),
    )
