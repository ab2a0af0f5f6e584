"""Export the data of a run for other tools: embeddings, splits, and predictions of test samples."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.data.table import EmbeddedTable
from fedvlm.engines.client import predict
from fedvlm.errors import DataError, unknown_name
from fedvlm.plugins import require
from fedvlm.record import Record
from fedvlm.runner.audit import reopen_run
from fedvlm.runner.load import Progress, encode, open_data, open_encoder_with_notes, smoke_dataset, smoke_subset
from fedvlm.runner.prepare import Prepared, prepare
from fedvlm.runner.settings import Settings
from fedvlm.runner.training import file_name, read_calibration
from fedvlm.runner.tune import with_tuned
from fedvlm.storage.files import atomic_write

Columns = dict[str, Sequence[Any]]
SPLIT_NAMES = ("train", "validation", "calibration", "test")


def export_data(run: str | Path, folder: Path, form: str, progress: Progress) -> list[Path]:
    """Write three tables about a finished run; `row` in each is the number of the sample.

    embeddings: a line per sample, which `store:FILE` reads again. splits: client and split of each sample by seed.
    predictions: calibrated probabilities of each client's test samples by seed and training.
    """
    if form not in ("parquet", "csv"):
        raise unknown_name("format", form, ["parquet", "csv"])
    record = Record(Path(run))
    settings, rows = reopen_run(record, None, progress)
    if record.manifest.get("multi_label"):
        raise DataError(f"{run} is a run on several findings per image, which are not exported yet; use fedvlm compare")
    names = sample_names(settings, rows, progress)
    seeds = [prepare(with_tuned(settings, record.manifest, seed), rows, seed) for seed in settings.seeds]
    predictions: list[Columns] = []
    for number, prepared in enumerate(seeds):
        predictions += test_predictions(record, prepared, names)
        progress("predicting", number + 1, len(seeds))
    splits = [columns for prepared in seeds for columns in split_columns(prepared)]
    tables = {"embeddings": embedding_columns(rows, names, form), "splits": _concatenate(splits)}
    tables["predictions"] = _concatenate(predictions)
    return [_write_columns(folder / f"{name}.{form}", columns, form) for name, columns in tables.items()]


def sample_names(settings: Settings, rows: EmbeddedTable, progress: Progress) -> list[str]:
    """Return the image file of each sample; empty where the run had embeddings and no images."""
    if settings.encoder.startswith("store:"):
        return [""] * len(rows.labels)
    dataset = open_data(settings.data, settings.source)
    if settings.smoke:
        dataset = smoke_dataset(dataset)
    encoder, _ = open_encoder_with_notes(settings.encoder, settings.access)
    done = encode(dataset, encoder, False, settings.precision, progress)  # from the cache
    indices = done.rows[smoke_subset(done.embedded)] if settings.smoke else done.rows
    return [dataset.source.name(index) for index in indices.tolist()]


def embedding_columns(rows: EmbeddedTable, names: Sequence[str], form: str) -> Columns:
    columns: Columns = {"row": range(len(rows.labels)), "path": names}
    columns |= {"label": [(*rows.classes, "")[label] for label in rows.labels.tolist()]}
    marked = {"client": rows.clients, "domain": rows.domains, "split": rows.splits, "group": rows.groups}
    columns |= {key: values.tolist() for key, values in marked.items() if values is not None and any(values)}
    x = rows.x.float().numpy()
    if form == "csv":
        return {**columns, **{f"e{place}": x[:, place].tolist() for place in range(x.shape[1])}}
    return {**columns, "embedding": list(x)}


def split_columns(prepared: Prepared) -> list[Columns]:
    """Return the columns of each client and split of one seed."""
    out: list[Columns] = []
    for id, client in prepared.partition.clients.items():
        for split in SPLIT_NAMES:
            indices = np.sort(getattr(client, split)).tolist()
            constants = {"seed": prepared.seed, "client": id, "split": split}
            out.append({**{key: [value] * len(indices) for key, value in constants.items()}, "row": indices})
    return out


def test_predictions(record: Record, prepared: Prepared, names: Sequence[str]) -> list[Columns]:
    """Return the columns of each client's test samples in each training of one seed."""
    out: list[Columns] = []
    classes = prepared.rows.classes
    for training in prepared.trainings:
        world, measured = prepared.world(training), prepared.measured_training(training)
        shared, local = record.outcome(training.name, prepared.seed)
        initial_local = world.method.init(world.frozen)[1]
        for id in (*measured.train, *measured.unseen):
            indices = world.members[id].test
            if not len(indices):
                continue
            logits = predict(world, world.method.send(shared, id), local.get(id, initial_local), indices)
            calibration = read_calibration(record, file_name(training, prepared.seed), id)
            log_p = logits.double().log_softmax(1) if calibration is None else calibration.log_probabilities(logits)
            p = log_p.exp().numpy()
            truth = world.y[torch.from_numpy(indices)].tolist()
            constants = {"seed": prepared.seed, "training": training.name, "client": id, "trained": id in local}
            columns: Columns = {key: [value] * len(indices) for key, value in constants.items()}
            columns |= {"row": indices.tolist(), "path": [names[row] for row in indices.tolist()]}
            columns |= {"label": [classes[label] for label in truth]}
            columns |= {"predicted": [classes[label] for label in p.argmax(axis=1).tolist()]}
            out.append({**columns, **{f"p_{name}": p[:, place].tolist() for place, name in enumerate(classes)}})
    return out


def _concatenate(parts: Sequence[Mapping[str, Sequence[Any]]]) -> Columns:
    if not parts:
        raise DataError("no client of the run has test samples; there is nothing to export")
    return {key: [cell for part in parts for cell in part[key]] for key in parts[0]}


def _write_columns(path: Path, columns: Columns, form: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        if form == "parquet":
            parquet = require("pyarrow.parquet", "Parquet, unlike csv, needs pyarrow", "datasets", DataError)
            import pyarrow

            arrays = {key: pyarrow.array(values) for key, values in columns.items()}
            parquet.write_table(pyarrow.table(arrays), temporary)
        else:
            with Path(temporary).open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns)
                writer.writerows(zip(*columns.values(), strict=True))
    return path
