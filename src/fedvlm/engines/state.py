"""The state of a training, and the plan it follows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from fedvlm.core import Method, Tensors
from fedvlm.engines.client import Local, RemoteState, Scores, as_tensors
from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import mean_accuracy
from fedvlm.storage.large_tensors import ClientStateStore
from fedvlm.tensors import count_bytes

PLACES_KEY = "places"  # positions of local tensors in a store on disk
POOLED_CLIENT = "pooled"  # the client that has everyone's samples, in centralised training
MAX_LOCAL_BYTES_IN_MEMORY = 64 << 20  # local tensors of all clients above it are kept on disk
Selection = Literal["last", "validation", "oracle"]


@dataclass(frozen=True)
class Plan:
    """Who trains, who is only measured, and which round's state is kept."""

    train: tuple[str, ...]
    unseen: tuple[str, ...]
    fraction: float = 1.0  # of the training clients in each round
    selection: Selection = "last"
    stop: int | None = None  # the round before which to stop; None: after all rounds of the method


@dataclass(frozen=True)
class State:
    """All that a training has learnt; everything else follows from the settings."""

    round: int  # rounds done
    shared: Tensors
    local: Mapping[str, Local]  # by client id, for clients that have taken part
    best: float = -1.0  # score of the selected round
    best_round: int = 0
    best_shared: Tensors | None = None  # None: the current state is the selected one
    best_local: Mapping[str, Local] | None = None
    channel: Mapping[str, Tensors] = field(default_factory=dict)  # channel state by client id


def with_client_count(method: Method, plan: Plan, state: State) -> State:
    """Set the number of clients that may take part, if the method shares a tensor for it."""
    name = method.traits.training.client_count
    if name is None:
        return state
    if name not in state.shared:
        raise SettingsError(
            f"method {method.name}: its traits say that {name!r} holds the number of clients, but "
            "init does not share such a tensor; add it"
        )
    count = torch.full_like(state.shared[name], len(plan.train))
    return replace(state, shared={**state.shared, name: count})


def selects_round(method: Any, plan: Plan) -> bool:
    """Tell whether there are rounds to select from; a method of one round is always reported after it."""
    return plan.selection != "last" and method.rounds > 1


def keep_best(plan: Plan, state: State, scores: Mapping[str, Scores]) -> State:
    """Keep the state if its score is better than that of every earlier one."""
    if plan.selection == "validation":
        score = mean_accuracy(scores, plan.train, "validation") or 0.0
    else:
        score = mean_accuracy(scores, {*plan.train, *plan.unseen}, "test") or 0.0
    if score <= state.best:
        return state
    return replace(state, best=score, best_round=state.round, best_shared=state.shared, best_local=dict(state.local))


def stores_on_disk(plan: Plan, initial_local: Local) -> bool:
    """Tell whether local tensors are on disk: if they are large, and no best round is kept."""
    if isinstance(initial_local, RemoteState) or plan.selection != "last":
        return False
    return count_bytes(initial_local) * len(plan.train) > MAX_LOCAL_BYTES_IN_MEMORY


def update_local(local: Mapping[str, Local], new: Mapping[str, Local]) -> Mapping[str, Local]:
    """Return the local tensors of all clients after some have trained."""
    if not isinstance(local, ClientStateStore):
        return {**local, **new}
    local.put({id: as_tensors(local_tensors) for id, local_tensors in new.items()})
    return local


def pack_state(state: State) -> tuple[Tensors, dict[str, Any]]:
    """Return a state as flat tensors, and the names of clients and tensors beside them.

    Of local tensors at their clients there are only versions, of those on disk only their places, which now stay.
    """
    store = state.local if isinstance(state.local, ClientStateStore) else None
    local = {"local": {} if store is not None else state.local, "best_local": state.best_local or {}}
    groups: dict[str, Mapping[str, Tensors]] = {"shared": {"": state.shared}, "channel": state.channel}
    groups["best_shared"] = {"": state.best_shared or {}}
    for group, by in local.items():
        groups[group] = {id: tensors for id, tensors in by.items() if not isinstance(tensors, RemoteState)}
    flat: Tensors = {} if store is None else {PLACES_KEY: store.commit()}
    index: dict[str, list[tuple[str, str]]] = {}
    for group, by_id in groups.items():
        index[group] = [(id, key) for id, tensors in by_id.items() for key in tensors]
        for number, (id, key) in enumerate(index[group]):
            flat[f"{group}/{number}"] = by_id[id][key]
    about = {
        "round": state.round,
        "best": state.best,
        "best_round": state.best_round,
        "chosen": state.best_shared is not None,
        "ids": {key: list(groups[key]) for key in ("local", "best_local", "channel")},
        "versions": {
            group: {id: tensors.version for id, tensors in by.items() if isinstance(tensors, RemoteState)}
            for group, by in local.items()
        },
        "index": index,
    }
    return flat, about


def unpack_state(flat: Tensors, about: Mapping[str, Any], store: ClientStateStore | None = None) -> State:
    def group(name: str) -> dict[str, Tensors]:
        out: dict[str, Tensors] = {id: {} for id in about["ids"].get(name, [""])}
        for number, (id, key) in enumerate(about["index"][name]):
            out[id][key] = flat[f"{name}/{number}"]
        return out

    def local(name: str) -> dict[str, Local]:
        return {**group(name), **{id: RemoteState(version) for id, version in about["versions"][name].items()}}

    chosen = about["chosen"]
    if store is not None:
        store.restore(flat[PLACES_KEY])
    return State(
        about["round"],
        group("shared")[""],
        local("local") if store is None else store,
        about["best"],
        about["best_round"],
        group("best_shared")[""] if chosen else None,
        local("best_local") if chosen else None,
        group("channel"),
    )
