"""A start for a head: one exchange without training, before the rounds that train."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from fedvlm.core import Frozen, HeadProvider, Method, Tempered
from fedvlm.engines.client import World
from fedvlm.engines.loop import initial_state, open_engine, run_rounds
from fedvlm.engines.state import Plan, State
from fedvlm.errors import SettingsError
from fedvlm.evaluate.protocols import Training
from fedvlm.record import Record
from fedvlm.runner.settings import Settings
from fedvlm.runner.training import file_name, has_checkpoint


def check_warm_start(first: Method, method: Method, frozen: Frozen) -> None:
    """Refuses a method that gives no head, and one that takes none."""
    if not isinstance(first, HeadProvider):
        raise SettingsError(f"warm_start = {first.name!r} gives no head to start from; use 'tofa'")
    first.init(frozen)
    head = method.init(frozen)[0].get("head")
    if head is None or tuple(head.shape) != (len(frozen.classes), frozen.dim):
        raise SettingsError(
            f"{method.name} shares no head over the classes, so it cannot start from "
            f"{first.name}'s; leave warm_start out, or take a method such as fedot or fedavg"
        )


def apply_warm_start(
    settings: Settings,
    training: Training,
    before: World,
    world: World,
    state: State,
    record: Record,
) -> State:
    """The first state with a one-shot method's head; a checkpoint is past that and needs none.

    `before` is the world as the one-shot method sees it. Its exchanges are rounds below 0.
    """
    first, name = before.method, file_name(training, world.seed)
    assert isinstance(first, HeadProvider)  # `check` has seen to it
    if has_checkpoint(record, name):
        return state
    record.drop_lines_after(name, -first.rounds)
    plan = Plan(training.train, training.unseen, settings.fraction)
    done, initial_local = initial_state(before)

    def on_round(_: State, line: dict[str, Any]) -> None:
        number = line["round"] - first.rounds
        record.add_line({"training": name, **line, "round": number, "warm start": first.name})

    engine = open_engine(settings.engine, before, settings.workers, first.rounds)
    with closing(engine):
        done = run_rounds(before, engine, plan, done, initial_local, on_round)
    scale = world.frozen.scale
    method_scale = world.method.tau if isinstance(world.method, Tempered) else scale
    head = scale / method_scale * first.initial_head(world.frozen, done.shared)
    has_class = head.abs().amax(1, keepdim=True) > 0  # nobody may have told of a class
    head = torch.where(has_class, head, state.shared["head"])
    return replace(state, shared={**state.shared, "head": head})
