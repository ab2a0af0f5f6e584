"""One training of a run: from the first state or a checkpoint, to its outcome on disk."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from fedvlm.channel.uploads import Arrived
from fedvlm.core import Tensors
from fedvlm.engines.client import Kept, Local, Terms, here
from fedvlm.engines.loop import Engine, Outcome, finish, train, unheard
from fedvlm.engines.state import Plan, State, after, pack, shelves, unpack
from fedvlm.evaluate import scores
from fedvlm.evaluate.protocols import Training
from fedvlm.record import PLACES, Record
from fedvlm.runner.settings import Settings
from fedvlm.storage.files import slug
from fedvlm.storage.sealed import read_json, read_tensors, write_json, write_tensors
from fedvlm.storage.shelf import Shelf

EVERY = 5.0  # seconds between checkpoints; a kill costs at most this much work


def carry_out(
    settings: Settings,
    training: Training,
    terms: Terms,
    engine: Engine,
    state: State,
    fresh: Local,
    record: Record,
    tell: Callable[[int], None],
    every: float | None = None,  # seconds between checkpoints
    on_sum: Callable[[int, Tensors, Arrived], None] = unheard,
) -> scores.Results:
    """Trains on an engine; a checkpoint goes before the state that is given."""
    every = EVERY if every is None else every
    name = file_name(training, terms.seed)
    plan = Plan(training.train, training.unseen, settings.fraction, settings.selection)
    checkpoint = _checkpoint(record, name)
    shelf = None
    if shelves(plan, fresh):
        place = checkpoint.with_suffix(".local")
        shelf = Shelf(place, (*plan.train, *state.local), here(fresh))
        state = replace(state, local=after(shelf, state.local))
    if checkpoint.exists():
        state = unpack(*read_tensors(checkpoint), shelf)
    record.keep_lines(name, state.round)
    saved = monotonic()
    tell(state.round)

    def on_round(state: State, line: dict[str, Any]) -> None:
        nonlocal saved
        record.add_line({"training": name, **line})
        if monotonic() - saved > every:
            write_tensors(checkpoint, *pack(state))
            saved = monotonic()
        tell(state.round)

    with closing(engine):
        state = train(terms, engine, plan, state, fresh, on_round, on_sum=on_sum)
        outcome = finish(terms, engine, plan, state, fresh)
    _save(record.folder / "trainings", name, training, outcome, fresh)
    checkpoint.unlink(missing_ok=True)
    if shelf is not None:
        shelf.close()
    return outcome.scores


def file_name(training: Training, seed: int) -> str:
    """What the files of a training are called."""
    return f"{seed}-{slug(training.name)}"


def _checkpoint(record: Record, name: str) -> Path:
    return record.folder / "trainings" / f"{name}.checkpoint"


def has_checkpoint(record: Record, name: str) -> bool:
    return _checkpoint(record, name).exists()


def finished(record: Record, name: str) -> scores.Results | None:
    final = record.folder / "trainings" / f"{name}.json"
    return dict(read_json(final)["scores"]) if final.exists() else None


def _save(folder: Path, name: str, training: Training, outcome: Outcome, fresh: Local) -> None:
    tensors = {f"shared/{key}": value for key, value in outcome.shared.items()}
    if isinstance(outcome.local, Shelf):  # too many to be in memory at once
        tensors[PLACES] = outcome.local.save(folder / f"{name}.clients", training.train)
        tensors |= {f"fresh/{key}": value for key, value in here(fresh).items()}
    else:
        tensors |= _numbered(training, outcome)
    about = {"round": outcome.round, "train": training.train, "unseen": training.unseen}
    write_tensors(folder / f"{name}.safetensors", tensors, about)
    write_json(folder / f"{name}.json", {**about, "scores": outcome.scores, "maps": outcome.maps})


def _numbered(training: Training, outcome: Outcome) -> Tensors:
    tensors: Tensors = {}
    for number, id in enumerate(training.train):  # numbered, because an id may hold anything
        own = outcome.local.get(id, {})  # none from a client that did not answer in the end
        if not isinstance(own, Kept):
            tensors |= {f"local/{number}/{key}": value for key, value in own.items()}
    return tensors
