"""What the classifiers of a training are calibrated by: rows that nothing else has read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvlm.core import Tensors
from fedvlm.engines.client import World, predict
from fedvlm.maths.calibration import Calibration, calibrate
from fedvlm.record import Record
from fedvlm.storage.files import read_json, write_json


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
