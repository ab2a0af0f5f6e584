"""One training of a run: from the first state or a checkpoint, to its outcome on disk."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any

from fedvlm.core import Tensors
from fedvlm.engines.client import World
from fedvlm.engines.flower.engine import VERSION
from fedvlm.engines.loop import Engine, Outcome, finish, train
from fedvlm.engines.state import Plan, State
from fedvlm.evaluate import protocols, scores
from fedvlm.record import Record, pack, unpack
from fedvlm.runner.settings import Settings
from fedvlm.storage.files import slug
from fedvlm.storage.sealed import read_json, read_tensors, write_json, write_tensors

EVERY = 5.0  # seconds between checkpoints; a kill costs at most this much work


def carry_out(
    settings: Settings,
    job: protocols.Job,
    world: World,
    engine: Engine,
    state: State,
    fresh: Tensors,
    record: Record,
    tell: Callable[[int], None],
    every: float | None = None,  # seconds between checkpoints
) -> scores.Results:
    """Trains on an engine; a checkpoint goes before the state that is given."""
    every = EVERY if every is None else every
    name = job_name(job, world.seed)
    plan = Plan(job.train, job.unseen, settings.fraction, settings.selection)
    checkpoint = _checkpoint(record, name)
    if checkpoint.exists():
        state = unpack(*read_tensors(checkpoint))
    record.keep_lines(name, state.round)
    saved = monotonic()
    tell(state.round)

    def on_round(state: State, line: dict[str, Any]) -> None:
        nonlocal saved
        record.add_line({"job": name, **line})
        if monotonic() - saved > every:
            write_tensors(checkpoint, *pack(state))
            saved = monotonic()
        tell(state.round)

    with closing(engine):
        state = train(world, engine, plan, state, fresh, on_round)
        outcome = finish(world, engine, plan, state, fresh)
    _save(record.folder / "jobs", name, job, outcome)
    checkpoint.unlink(missing_ok=True)
    return outcome.scores


def job_name(job: protocols.Job, seed: int) -> str:
    """What the files of a training are called."""
    return f"{seed}-{slug(job.name)}"


def _checkpoint(record: Record, name: str) -> Path:
    return record.folder / "jobs" / f"{name}.checkpoint"


def has_checkpoint(record: Record, name: str) -> bool:
    return _checkpoint(record, name).exists()


def finished(record: Record, name: str) -> scores.Results | None:
    final = record.folder / "jobs" / f"{name}.json"
    return dict(read_json(final)["scores"]) if final.exists() else None


def _save(folder: Path, name: str, job: protocols.Job, outcome: Outcome) -> None:
    tensors = {f"shared/{key}": value for key, value in outcome.shared.items()}
    for number, id in enumerate(job.train):  # numbered, because an id may hold anything
        own = outcome.local.get(id, {})  # none from a client that did not answer in the end
        tensors |= {f"local/{number}/{key}": own[key] for key in own if key != VERSION}
    about = {"round": outcome.round, "train": job.train, "unseen": job.unseen}
    write_tensors(folder / f"{name}.safetensors", tensors, about)
    write_json(folder / f"{name}.json", {**about, "scores": outcome.scores, "maps": outcome.maps})
