"""A start for a head: one exchange without training, before the rounds that train."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

from torch import Tensor

from fedvlm.core import Frozen
from fedvlm.engines.rounds import Plan, State, open_engine, start, train
from fedvlm.engines.work import World
from fedvlm.errors import SettingsError
from fedvlm.settings import Settings


def check(first: Any, method: Any, frozen: Frozen) -> None:
    """Refuses a method that gives no head, and one that takes none."""
    if not callable(getattr(first, "head", None)):
        raise SettingsError(f"warm_start = {first.name!r} gives no head to start from; use 'tofa'")
    first.init(frozen)
    head = method.init(frozen)[0].get("head")
    if head is None or tuple(head.shape) != (len(frozen.classes), frozen.dim):
        raise SettingsError(
            f"{method.name} shares no head over the classes, so it cannot start from "
            f"{first.name}'s; leave warm_start out, or take a method such as fedot or fedavg"
        )


def head(
    settings: Settings, world: World, plan: Plan, on_line: Callable[[dict[str, Any]], None]
) -> Tensor:
    """(classes, dim) of a one-shot method, the world's; its exchanges are rounds below 0."""
    first = world.method
    state, fresh = start(world)

    def on_round(_: State, line: dict[str, Any]) -> None:
        on_line({**line, "round": line["round"] - first.rounds, "warm start": first.name})

    engine = open_engine(settings.engine, world, settings.workers, first.rounds)
    with closing(engine):
        state = train(world, engine, plan, state, fresh, on_round)
    scale = world.frozen.scale
    out: Tensor = first.head(world.frozen, state.shared)
    return scale / getattr(settings.method, "tau", scale) * out
