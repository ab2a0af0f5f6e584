"""One training of a run: from the first state or a checkpoint, to its outcome on disk."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from fedvlm.channel.pipeline import DecodedUploads
from fedvlm.core import HeadProvider, Tempered, Tensors
from fedvlm.engines.client import Local, RemoteState, TrainingTerms, World, as_tensors, predict
from fedvlm.engines.loop import Engine, Outcome, finish_training, ignore_sum, initial_state, open_engine, run_rounds
from fedvlm.engines.state import Plan, State, pack_state, stores_on_disk, unpack_state, update_local
from fedvlm.evaluate import metrics
from fedvlm.evaluate.protocols import Training
from fedvlm.maths.calibration import Calibration, calibrate
from fedvlm.record import PLACES_KEY, Record
from fedvlm.runner import tune
from fedvlm.runner.prepare import Prepared
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


def train(
    prepared: Prepared, training: Training, record: Record, report_rounds: Callable[[int], None]
) -> metrics.Results:
    """One training in this process, unless it is finished."""
    settings, name = prepared.settings, file_name(training, prepared.seed)
    if (previous_scores := finished_scores(record, name)) is not None:
        save_calibrations(record, name, training.name, prepared.seed, prepared.world(training))
        return previous_scores
    world = prepared.world(training)
    state, initial_local = initial_state(world)
    state = replace(state, channel=tune.initial_spend(record.manifest, training.name, prepared.seed))
    if settings.warm_start is not None:
        state = apply_warm_start(settings, training, prepared.warm_world(training), world, state, record)
    engine = open_engine(settings.engine, world, settings.workers, settings.method.rounds)
    taught = prepared.measured_training(training)
    results = run_training(settings, taught, world, engine, state, initial_local, record, report_rounds)
    save_calibrations(record, name, training.name, prepared.seed, world)
    return results


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


def calibration(world: World, sent: Tensors, local: Tensors, id: str) -> Calibration:
    """Of one client's classifier: temperature by its validation rows, scores of those set aside."""
    member = world.members[id]
    classes = len(world.frozen.classes)
    parts: list[Tensor] = []
    for rows in (member.validation, member.calibration):
        logits = predict(world, sent, local, rows) if len(rows) else torch.zeros(0, classes)
        parts += [logits, world.y[torch.from_numpy(rows)]]
    return calibrate(*parts)


def calibration_path(record: Record, name: str) -> Path:
    return record.folder / "trainings" / f"{name}.calibration.json"


def save_calibrations(record: Record, name: str, training: str, seed: int, world: World) -> None:
    """Writes what the classifiers of a training need beside its outcome, unless it is there.

    The clients of a crowd have too few rows to be calibrated by.
    """
    if calibration_path(record, name).exists() or world.has_many_clients:
        return
    shared, local = record.outcome(training, seed)
    send = world.method.send
    calibrations = {
        id: to_json(calibration(world, send(shared, id), client_local, id))
        for id, client_local in local.items()
        if id in world.members
    }
    write_json(calibration_path(record, name), calibrations)


def to_json(fit: Calibration) -> dict[str, Any]:
    """A calibration as JSON holds it."""
    return {
        "log_heat": fit.log_heat,
        "rows": fit.rows,
        "scores": fit.scores.tolist(),
        "labels": fit.labels.tolist(),
    }


def from_json(payload: Mapping[str, Any]) -> Calibration:
    scores = torch.tensor(payload["scores"], dtype=torch.float64)
    labels = torch.tensor(payload["labels"], dtype=torch.int64)
    return Calibration(float(payload["log_heat"]), int(payload["rows"]), scores, labels)


def read_calibration(record: Record, name: str, id: str) -> Calibration | None:
    """None where a run is older than calibration, or its rows were never here."""
    path = calibration_path(record, name)
    payload = read_json(path).get(id) if path.exists() else None
    return None if payload is None else from_json(payload)
