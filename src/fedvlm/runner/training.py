"""Run one training of a run: from its first state or a checkpoint to its outcome and calibration on disk."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlm.channel.pipeline import DecodedUploads
from fedvlm.core import HeadProvider, Tempered, Tensors
from fedvlm.engines.client import Engine, Local, RemoteState, TrainingTerms, World, as_tensors, predict
from fedvlm.engines.loop import Outcome, finish_training, ignore_sum, initial_state, open_engine, run_rounds
from fedvlm.engines.sequential import one_thread
from fedvlm.engines.state import Plan, State, pack_state, stores_on_disk, unpack_state, update_local
from fedvlm.evaluate.metrics import Results
from fedvlm.evaluate.protocols import Training
from fedvlm.maths.calibration import Calibration, calibrate, calibrate_findings
from fedvlm.maths.novelty import Novelty, fit_novelty
from fedvlm.record import CLUSTER_FOLDER, PLACES_KEY, Record
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.settings import Settings
from fedvlm.runner.tune import initial_spend
from fedvlm.storage.files import is_locked, read_json, read_tensors, slug, write_json, write_tensors
from fedvlm.storage.large_tensors import ClientStateStore

MAX_NOVELTY_CLIENTS = 100  # each takes up to 64 directions and its class means on disk
CHECKPOINT_SECONDS = 5.0  # between checkpoints; a kill costs at most this much work


@dataclass(frozen=True)
class TrainingRun:
    """One training and the record it goes to."""

    settings: Settings
    training: Training
    terms: TrainingTerms
    record: Record

    @property
    def name(self) -> str:
        return file_name(self.training, self.terms.seed)

    @property
    def checkpoint(self) -> Path:
        return self.record.folder / "trainings" / f"{self.name}.checkpoint"


def train(prepared: Prepared, training: Training, record: Record, report_rounds: Callable[[int], None]) -> Results:
    """Run one training in this process, or read the scores of a finished one."""
    settings, world = prepared.settings, prepared.world(training)
    run = TrainingRun(settings, prepared.measured_training(training), world, record)
    scores = finished_scores(record, run.name)
    if scores is None:
        state, initial_local = initial_state(world)
        state = replace(state, channel=initial_spend(record.manifest, training.name, prepared.seed))
        if settings.warm_start is not None and not run.checkpoint.exists():  # a checkpoint is past the warm start
            state = warm_state(replace(run, training=training), prepared.warm_world(training), state)
        engine = open_engine(settings.engine, world, settings.workers, settings.method.rounds)
        scores = run_training(run, engine, state, initial_local, report_rounds)
    # Read from the file, so that a resumed run has the same bits.
    save_calibrations(record, run.name, training.name, world)
    return scores


def run_training(
    run: TrainingRun,
    engine: Engine,
    state: State,
    initial_local: Local,
    report_rounds: Callable[[int], None],
    checkpoint_seconds: float | None = None,
    on_sum: Callable[[int, Tensors, DecodedUploads], None] = ignore_sum,
) -> Results:
    """Train from `state`, or from the checkpoint if there is one, and save the outcome."""
    checkpoint_seconds = CHECKPOINT_SECONDS if checkpoint_seconds is None else checkpoint_seconds
    settings, training, terms, record, name = run.settings, run.training, run.terms, run.record, run.name
    plan = Plan(training.train, training.unseen, settings.fraction, settings.selection)
    local_store = None
    if stores_on_disk(plan, initial_local):
        place = run.checkpoint.with_suffix(".local")
        local_store = ClientStateStore(place, (*plan.train, *state.local), as_tensors(initial_local))
        state = replace(state, local=update_local(local_store, state.local))
    if run.checkpoint.exists():
        state = unpack_state(*read_tensors(run.checkpoint), local_store)
    record.drop_lines_after(name, state.round)
    saved = monotonic()
    report_rounds(state.round)

    def on_round(state: State, line: dict[str, Any]) -> None:
        nonlocal saved
        record.add_line({"training": name, **line})
        if monotonic() - saved > checkpoint_seconds:
            write_tensors(run.checkpoint, *pack_state(state))
            saved = monotonic()
        report_rounds(state.round)

    with closing(engine):
        state = run_rounds(terms, engine, plan, state, initial_local, on_round, on_sum=on_sum)
        outcome = finish_training(terms, engine, plan, state, initial_local)
    _save_outcome(record.folder / "trainings", name, training, outcome, initial_local)
    run.checkpoint.unlink(missing_ok=True)
    if local_store is not None:
        local_store.close()
    return outcome.scores


def file_name(training: Training, seed: int) -> str:
    """Return the stem of the files of a training."""
    return f"{seed}-{slug(training.name)}"


def finished_scores(record: Record, name: str) -> Results | None:
    path = record.folder / "trainings" / f"{name}.json"
    return dict(read_json(path)["scores"]) if path.exists() else None


def _save_outcome(folder: Path, name: str, training: Training, outcome: Outcome, initial_local: Local) -> None:
    tensors = {f"shared/{key}": value for key, value in outcome.shared.items()}
    if isinstance(outcome.local, ClientStateStore):  # too many to be in memory at once
        tensors[PLACES_KEY] = outcome.local.save(folder / f"{name}.clients", training.train)
        tensors |= {f"fresh/{key}": value for key, value in as_tensors(initial_local).items()}
    else:
        for number, id in enumerate(training.train):  # numbered, because an id may hold anything
            local = outcome.local.get(id, {})  # empty if a client did not answer in the end
            if not isinstance(local, RemoteState):
                tensors |= {f"local/{number}/{key}": value for key, value in local.items()}
    about = {"round": outcome.round, "train": training.train, "unseen": training.unseen}
    write_tensors(folder / f"{name}.safetensors", tensors, about)
    write_json(folder / f"{name}.json", {**about, "scores": outcome.scores, "maps": outcome.descriptions})


def warm_state(run: TrainingRun, warm_world: World, state: State) -> State:
    """Return the first state with the head of a one-shot method, whose communication rounds have numbers below 0."""
    settings, training, record = run.settings, run.training, run.record
    first, frozen, method = warm_world.method, run.terms.frozen, run.terms.method
    assert isinstance(first, HeadProvider)  # prepare.check_warm_start refuses others
    record.drop_lines_after(run.name, -first.rounds)
    plan = Plan(training.train, training.unseen, settings.fraction)
    done, initial_local = initial_state(warm_world)

    def on_round(_: State, line: dict[str, Any]) -> None:
        number = line["round"] - first.rounds
        record.add_line({"training": run.name, **line, "round": number, "warm start": first.name})

    with closing(open_engine(settings.engine, warm_world, settings.workers, first.rounds)) as engine:
        done = run_rounds(warm_world, engine, plan, done, initial_local, on_round)
    method_scale = method.tau if isinstance(method, Tempered) else frozen.scale
    head = frozen.scale / method_scale * first.initial_head(frozen, done.shared)
    has_class = head.abs().amax(1, keepdim=True) > 0  # a class may have no statistics
    head = torch.where(has_class, head, state.shared["head"])
    return replace(state, shared={**state.shared, "head": head})


def fit_calibration(world: World, sent: Tensors, local: Tensors, id: str) -> Calibration:
    """Fit one client's temperature on its validation samples, and score its calibration samples."""
    member = world.members[id]
    parts: list[Tensor] = []
    for rows in (member.validation, member.calibration):
        logits = predict(world, sent, local, rows) if len(rows) else torch.zeros(0, len(world.frozen.classes))
        parts += [logits, world.y[torch.from_numpy(rows)]]
    return calibrate_findings(*parts) if world.frozen.multi_label else calibrate(*parts)


def fit_client_novelty(world: World, id: str) -> Novelty | None:
    """Fit one client's detector of strange images on its training samples, and its limit on held-out ones."""
    member = world.members[id]
    if len(world.x.shape) > 3:  # pixels
        return None
    y = world.y[torch.from_numpy(member.train)]
    labels = y if y.ndim == 1 else torch.zeros(len(y), dtype=torch.int64)  # findings: one mean for all samples
    held_out = np.concatenate([member.validation, member.calibration])
    return fit_novelty(world.read(member.train), labels, world.read(held_out))


def save_calibrations(record: Record, name: str, training: str, world: World) -> None:
    """Write the calibration of each client's classifier, unless it is there.

    Clients of a large federation have too few samples to be calibrated.
    """
    path = record.folder / "trainings" / f"{name}.calibration.json"
    if path.exists() or world.has_many_clients:
        return
    shared, local_tensors = record.outcome(training, world.seed)
    fits = {id: (world.method.send(shared, id), own) for id, own in local_tensors.items() if id in world.members}
    calibrations = {id: calibration_to_json(fit_calibration(world, *sent, id)) for id, sent in fits.items()}
    _save_novelty(record, name, world, list(calibrations))
    write_json(path, calibrations)


def _save_novelty(record: Record, name: str, world: World, ids: Sequence[str]) -> None:
    if len(ids) > MAX_NOVELTY_CLIENTS:
        return
    with one_thread():
        fitted = {id: novelty for id in ids if (novelty := fit_client_novelty(world, id)) is not None}
    if fitted:
        parts = [novelty._asdict() for novelty in fitted.values()]
        tensors = {f"{number}/{key}": value for number, part in enumerate(parts) for key, value in part.items()}
        write_tensors(record.folder / "trainings" / f"{name}.novelty", tensors, {"clients": list(fitted)})


def read_novelty(record: Record, name: str, id: str) -> Novelty | None:
    """Return a client's detector of strange images; None if the run has none."""
    path = record.folder / "trainings" / f"{name}.novelty"
    if not path.exists():
        return None
    tensors, about = read_tensors(path)
    if id not in about["clients"]:
        return None
    number = about["clients"].index(id)
    return Novelty(*(tensors[f"{number}/{key}"] for key in Novelty._fields))


def read_calibration(record: Record, name: str, id: str) -> Calibration | None:
    """Return a client's calibration; None if the run has none, as a deployed one whose samples are at the sites."""
    path = record.folder / "trainings" / f"{name}.calibration.json"
    payload = read_json(path).get(id) if path.exists() else None
    return None if payload is None else calibration_from_json(payload)


def calibration_to_json(fit: Calibration) -> dict[str, Any]:
    lists = {"scores": fit.scores.tolist(), "labels": fit.labels.tolist()}
    out = {"log_temperature": fit.log_temperature, "rows": fit.rows, **lists}
    return out | ({"findings": [calibration_to_json(part) for part in fit.findings]} if fit.findings else {})


def calibration_from_json(payload: Mapping[str, Any]) -> Calibration:
    scores = torch.tensor(payload["scores"], dtype=torch.float64)
    labels = torch.tensor(payload["labels"], dtype=torch.int64)
    findings = tuple(map(calibration_from_json, payload.get("findings", ())))
    return Calibration(float(payload["log_temperature"]), int(payload["rows"]), scores, labels, findings)


def collect_lost_trainings(record: Record) -> None:
    """Move checkpoints that lost workers of a cluster left in the run's folder into its record."""
    for folder in sorted((record.folder / CLUSTER_FOLDER).glob("*")):
        if is_locked(folder / ".lock"):  # a worker is still busy with it
            continue
        left, trainings = folder / "trainings", record.folder / "trainings"
        checkpoint = f"{folder.name}.checkpoint"
        if (left / checkpoint).exists() and not (trainings / f"{folder.name}.json").exists():
            record.drop_lines_after(folder.name, 0)
            for line in Record(folder).lines():
                record.add_line(line)
            trainings.mkdir(exist_ok=True)
            for file in (left / f"{folder.name}.local", left / checkpoint):
                if file.exists():
                    file.replace(trainings / file.name)
        rmtree(folder, ignore_errors=True)
