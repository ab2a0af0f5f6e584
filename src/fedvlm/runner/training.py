"""One training of a run: from the first state or a checkpoint, to its outcome on disk."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from fedvlm.channel.pipeline import DecodedUploads
from fedvlm.core import Tensors
from fedvlm.engines.client import Local, RemoteState, TrainingTerms, as_tensors
from fedvlm.engines.loop import Engine, Outcome, finish_training, ignore_sum, run_rounds
from fedvlm.engines.state import Plan, State, pack_state, stores_on_disk, unpack_state, update_local
from fedvlm.evaluate import metrics
from fedvlm.evaluate.protocols import Training
from fedvlm.record import PLACES_KEY, Record
from fedvlm.runner.settings import Settings
from fedvlm.storage.files import read_json, read_tensors, slug, write_json, write_tensors
from fedvlm.storage.large_tensors import ClientStateStore

CHECKPOINT_SECONDS = 5.0  # seconds between checkpoints; a kill costs at most this much work


def run_training(
    settings: Settings,
    training: Training,
    terms: TrainingTerms,
    engine: Engine,
    state: State,
    initial_local: Local,
    record: Record,
    report_rounds: Callable[[int], None],
    checkpoint_seconds: float | None = None,  # seconds between checkpoints
    on_sum: Callable[[int, Tensors, DecodedUploads], None] = ignore_sum,
) -> metrics.Results:
    """Trains on an engine; a checkpoint goes before the state that is given."""
    checkpoint_seconds = CHECKPOINT_SECONDS if checkpoint_seconds is None else checkpoint_seconds
    name = file_name(training, terms.seed)
    plan = Plan(training.train, training.unseen, settings.fraction, settings.selection)
    checkpoint = _checkpoint(record, name)
    local_store = None
    if stores_on_disk(plan, initial_local):
        place = checkpoint.with_suffix(".local")
        local_store = ClientStateStore(place, (*plan.train, *state.local), as_tensors(initial_local))
        state = replace(state, local=update_local(local_store, state.local))
    if checkpoint.exists():
        state = unpack_state(*read_tensors(checkpoint), local_store)
    record.drop_lines_after(name, state.round)
    saved = monotonic()
    report_rounds(state.round)

    def on_round(state: State, line: dict[str, Any]) -> None:
        nonlocal saved
        record.add_line({"training": name, **line})
        if monotonic() - saved > checkpoint_seconds:
            write_tensors(checkpoint, *pack_state(state))
            saved = monotonic()
        report_rounds(state.round)

    with closing(engine):
        state = run_rounds(terms, engine, plan, state, initial_local, on_round, on_sum=on_sum)
        outcome = finish_training(terms, engine, plan, state, initial_local)
    _save_outcome(record.folder / "trainings", name, training, outcome, initial_local)
    checkpoint.unlink(missing_ok=True)
    if local_store is not None:
        local_store.close()
    return outcome.scores


def file_name(training: Training, seed: int) -> str:
    """What the files of a training are called."""
    return f"{seed}-{slug(training.name)}"


def _checkpoint(record: Record, name: str) -> Path:
    return record.folder / "trainings" / f"{name}.checkpoint"


def has_checkpoint(record: Record, name: str) -> bool:
    return _checkpoint(record, name).exists()


def finished_scores(record: Record, name: str) -> metrics.Results | None:
    final = record.folder / "trainings" / f"{name}.json"
    return dict(read_json(final)["scores"]) if final.exists() else None


def _save_outcome(folder: Path, name: str, training: Training, outcome: Outcome, initial_local: Local) -> None:
    tensors = {f"shared/{key}": value for key, value in outcome.shared.items()}
    if isinstance(outcome.local, ClientStateStore):  # too many to be in memory at once
        tensors[PLACES_KEY] = outcome.local.save(folder / f"{name}.clients", training.train)
        tensors |= {f"fresh/{key}": value for key, value in as_tensors(initial_local).items()}
    else:
        tensors |= _local_tensors(training, outcome)
    about = {"round": outcome.round, "train": training.train, "unseen": training.unseen}
    write_tensors(folder / f"{name}.safetensors", tensors, about)
    write_json(folder / f"{name}.json", {**about, "scores": outcome.scores, "maps": outcome.descriptions})


def _local_tensors(training: Training, outcome: Outcome) -> Tensors:
    tensors: Tensors = {}
    for number, id in enumerate(training.train):  # numbered, because an id may hold anything
        client_local = outcome.local.get(id, {})  # none from a client that did not answer in the end
        if not isinstance(client_local, RemoteState):
            tensors |= {f"local/{number}/{key}": value for key, value in client_local.items()}
    return tensors
