"""A start for a head: one exchange without training, before the rounds that train."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from fedvlm.core import Frozen, Tensors
from fedvlm.engines.rounds import Plan, State, open_engine, start, train
from fedvlm.engines.work import World
from fedvlm.errors import SettingsError


def check(first: Any, method: Any, frozen: Frozen) -> None:
    """Refuses a method that gives no head, and one that takes none."""
    if not hasattr(first, "head"):
        raise SettingsError(f"warm_start = {first.name!r} gives no head to start from; use 'tofa'")
    shared, _ = method.init(frozen)
    head = shared.get("head")
    if head is None or tuple(head.shape) != (len(frozen.classes), frozen.dim):
        raise SettingsError(
            f"{method.name} shares no head over the classes, so it cannot start from "
            f"{first.name}'s; leave warm_start out, or take a method such as fedot or fedavg"
        )


def warmed(
    first: Any,
    world: World,
    plan: Plan,
    shared: Tensors,
    engine: str,
    workers: int,
    on_line: Callable[[dict[str, Any]], None],
) -> Tensors:
    """What is shared, with the head of a one-shot method; its exchanges are rounds below 0."""
    before = replace(world, method=first)
    state, fresh = start(before)

    def on_round(_: State, line: dict[str, Any]) -> None:
        on_line({**line, "round": line["round"] - first.rounds, "warm start": first.name})

    with closing(open_engine(engine, before, workers, first.rounds)) as opened:
        state = train(before, opened, plan, state, fresh, on_round)
    head = first.head(world.frozen, state.shared)
    scale = world.frozen.scale / getattr(world.method, "tau", world.frozen.scale)
    return {**shared, "head": scale * head}
