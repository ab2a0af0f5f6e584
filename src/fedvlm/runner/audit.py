"""Audit what each client uploaded in a run, and how much it reveals about single samples.

A record keeps no uploads. The first one (of a warm start, if there is one) is computed again from
the start, exactly as it was; for a method of several rounds also the next one, which would follow
the recorded end.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm import seeds, tensors
from fedvlm.channel.pipeline import UploadPipeline
from fedvlm.core import ClassStatistics, Tensors
from fedvlm.data.table import EmbeddedTable
from fedvlm.engines.client import ClientRows, Task, TrainingTerms, World, member_rows, predict
from fedvlm.engines.loop import initial_state
from fedvlm.engines.sequential import Sequential
from fedvlm.errors import DataError, SettingsError, unknown_name
from fedvlm.evaluate.protocols import Training
from fedvlm.maths.privacy import mean_similarities, roc_auc_by_class, seeded_normal
from fedvlm.parts.findings import finding_frozen, select_finding
from fedvlm.record import Record
from fedvlm.runner import tune
from fedvlm.runner.load import Progress, load, shrink_for_smoke
from fedvlm.runner.prepare import Prepared, prepare
from fedvlm.runner.reconstruction import recovered_from_sum, recovered_from_upload, span_auc
from fedvlm.runner.settings import Settings, build

Line = dict[str, Any]
MAX_ATTACKED_CLIENTS = 4  # whose samples a crafted head is tried on; each takes seconds


def audit(
    folder: str | Path,
    training: str | None = None,
    seed: int | None = None,
    embedded: EmbeddedTable | None = None,
    progress: Progress | None = None,
) -> list[Line]:
    """Return a line per client and upload of a training (the first one by default)."""
    result = Record(Path(folder))
    settings, rows = reopen_run(result, embedded, progress or (lambda activity, done, total: None))
    seed = settings.seeds[0] if seed is None else seed
    prepared = prepare(tune.with_tuned(settings, result.manifest, seed), rows, seed)
    chosen = _training(prepared, training)
    shared, local = result.outcome(chosen.name, seed)
    world = prepared.world(chosen)
    initial_local = initial_state(world)[1]
    spent = _epsilons(result, chosen.name, seed)
    lines = []
    for phase, at, number, before, local_before in replay_exchanges(prepared, chosen, shared, local):
        blank = initial_state(at)[1]
        tasks = [Task(id, at.method.send(before, id), local_before.get(id, blank), True) for id in sorted(chosen.train)]
        done = Sequential(at).round(number, tasks).replies
        received = {task.id: as_received(at, number, task, done[task.id].upload or {}) for task in tasks}
        ids = [task.id for task in tasks]
        views = problems_of(at)
        received_by_view = [{id: view.select(upload) for id, upload in received.items()} for view in views]
        pairs = list(zip(views, received_by_view, strict=True))
        of_sum = {"AUC span of sum": _worst(span_auc(v.world, ids, [got[id] for id in ids]) for v, got in pairs)}
        of_sum["recovered from sum"] = _worst(recovered_from_sum(v.world, ids) for v in views if phase != "next")
        for task in tasks:
            id, sent = task.id, world.method.send(shared, task.id)
            line: Line = {"training": chosen.name, "client": id, "exchange": phase}
            line |= describe_upload(received[id]) | _count_covered(pairs, id)
            line["AUC upload"] = _worst(upload_auc(v.world, v.task(task), got, v.select(blank)) for v, got in pairs)
            line["AUC span"] = _worst(span_auc(v.world, [id], [got[id]]) for v, got in pairs)
            is_attacked = phase != "next" and id in ids[:MAX_ATTACKED_CLIENTS]
            line["recovered"] = _worst(recovered_from_upload(v.world, id) for v in views if is_attacked)
            line |= of_sum
            for key, last in (("AUC shared", initial_local), ("AUC personal", local[id])):
                line[key] = _worst(loss_auc(v.world, v.select(sent), v.select(last), id) for v in problems_of(world))
            lines.append({**line, "epsilon": spent.get(id)})
    return lines


@dataclass(frozen=True)
class Problem:
    """One classification that is attacked: all of a run, or one finding of several per image."""

    world: World
    finding: int | None = None

    def select(self, values: Tensors) -> Tensors:
        return values if self.finding is None else select_finding(values, self.finding)

    def task(self, task: Task) -> Task:
        return replace(task, sent=self.select(task.sent), local=self.select(task.local_tensors))


def problems_of(world: World) -> list[Problem]:
    """Return the run as it is, or each finding as a problem of two classes on the samples whose label is known."""
    if not world.frozen.multi_label:
        return [Problem(world)]
    method: Any = world.method
    problems = []
    for finding, y in enumerate(world.y.unbind(1)):
        known = (y >= 0).numpy()
        members = {
            id: ClientRows(*(rows[known[rows]] for rows in member_rows(member))) for id, member in world.members.items()
        }
        frozen = finding_frozen(world.frozen, finding)
        problems.append(Problem(replace(world, method=method.single, frozen=frozen, y=y, members=members), finding))
    return problems


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _training(prepared: Prepared, name: str | None) -> Training:
    trainings = {training.name: training for training in prepared.trainings}
    if name is not None and name not in trainings:
        raise unknown_name("training of this run", name, trainings)
    return prepared.trainings[0] if name is None else trainings[name]


ReplayedExchange = tuple[str, World, int, Tensors, Mapping[str, Tensors]]


def replay_exchanges(
    prepared: Prepared, training: Training, shared: Tensors, local: Mapping[str, Tensors]
) -> Iterator[ReplayedExchange]:
    """Which, where, its number, and the shared and local tensors that it started from."""
    world = prepared.world(training)
    if prepared.settings.warm_start is not None:
        at = prepared.warm_world(training)
        yield "warm start", at, 0, initial_state(at)[0].shared, {}
    elif world.method.rounds:
        yield "first", world, 0, initial_state(world)[0].shared, {}
    if world.method.rounds > 1:
        yield "next", world, world.method.rounds, shared, local


def reopen_run(result: Record, embedded: EmbeddedTable | None, progress: Progress) -> tuple[Settings, EmbeddedTable]:
    """Return the settings and the same samples of a finished run."""
    about = result.manifest
    _ = result.tables  # refuses a run that is not finished
    settings = build(about["identity"])
    if about["memory"] and embedded is None:
        raise SettingsError(f"{result.folder} took its samples from memory; call audit(..., embedded=...) with them")
    rows = embedded if embedded is not None else load(settings, progress)[0]
    if settings.smoke:
        settings, rows = shrink_for_smoke(settings, rows)
    if rows.fingerprint != about["rows"]:
        then, now = about["rows"][:12], rows.fingerprint[:12]
        problem = f"{result.folder} is of the rows {then}, but there are now {now}"
        raise DataError(f"{problem}; audit it with the data it was run on")
    return settings, rows


def _epsilons(result: Record, training: str, seed: int) -> dict[str, float]:
    """ε by client as the record has it, from the method or from the channel; no noise, no entry."""
    maps = result.trainings(seed)[training]["maps"]
    out = {id: float(entry["epsilon"]) for id, entry in maps.items() if "epsilon" in entry}
    stem = result.path_of(training, seed, "json").stem
    noised = [entry for entry in result.lines() if entry["training"] == stem and "epsilon" in entry]
    return out or ({id: float(noised[-1]["epsilon"]) for id in maps} if noised else {})


def as_received(terms: TrainingTerms, number: int, task: Task, upload: Tensors) -> Tensors:
    """Return an upload as the server decodes it; a verified sum would hide it."""
    draw = seeded_normal(seeds.generator("channel noise", terms.seed, task.id, number))
    pipeline = UploadPipeline(terms.channel)
    encoded, _ = pipeline.encode(upload, task.sent, {}, draw)
    return pipeline.decode(encoded, task.sent)


def _count_covered(pairs: Sequence[tuple[Problem, Mapping[str, Tensors]]], id: str) -> Line:
    """Count the classes (of findings: present or absent) in an upload, and the samples of the smallest."""
    sizes: list[int] = []
    for problem, received in pairs:
        world = problem.world
        labels = world.y[torch.from_numpy(world.members[id].train)]
        counts = torch.bincount(labels, minlength=len(world.frozen.classes))
        covered = counts > 0
        if isinstance(world.method, ClassStatistics):
            covered &= world.method.covered_classes(received[id])
        sizes += counts[covered].tolist()
    return {"classes": len(sizes), "smallest class": min(sizes, default=None)}


def describe_upload(upload: Tensors) -> Line:
    """Return the fields and bytes of an upload."""
    fields = {}
    for key, value in upload.items():
        dtype = str(value.dtype).removeprefix("torch.")
        fields[key] = {"shape": list(value.shape), "dtype": dtype, "bytes": tensors.count_bytes({key: value})}
    return {"fields": fields, "bytes": tensors.count_bytes(upload)}


def upload_auc(world: World, task: Task, received: Mapping[str, Tensors], initial_local: Tensors) -> float | None:
    """Return the AUC of membership inference from the upload alone, by its class means or by the loss of its model."""
    upload = received[task.id]
    means = {}
    if isinstance(world.method, ClassStatistics):
        means = {id: world.method.class_means(entry) for id, entry in received.items()}
    if (own_means := means.get(task.id)) is not None:
        rest = [entry for id, entry in means.items() if id != task.id and entry is not None]
        other_means = torch.stack(rest or [0 * own_means])
        has_class = (other_means != 0).any(dim=2)
        mean_of_others = other_means.sum(dim=0) / has_class.sum(dim=0).clamp(min=1)[:, None]
        return _means_auc(world, task.id, own_means, mean_of_others)
    if upload and upload.keys() == task.sent.keys():
        return loss_auc(world, upload, initial_local, task.id)
    return None


def _means_auc(world: World, id: str, own_means: Tensor, mean_of_others: Tensor) -> float | None:
    has_class = (own_means != 0).any(dim=1)

    def scores(rows: NDArray[np.int64]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        index = torch.from_numpy(rows)
        index = index[has_class[world.y[index]]]
        x, y = tensors.to_float32(world.x[index]), world.y[index]
        return mean_similarities(x, y, own_means.float(), mean_of_others.float()), y

    member = world.members[id]
    (inside, labels), (outside, other_labels) = scores(member.train), scores(member.test)
    areas = [roc_auc_by_class(a, labels, b, other_labels) for a, b in zip(inside, outside, strict=True)]
    return max((area for area in areas if area is not None), default=None)


def loss_auc(world: World, sent: Tensors, local: Tensors, id: str) -> float | None:
    """Return the AUC of membership inference by loss: training samples have a smaller one than test samples."""
    member = world.members[id]

    def scores(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        y = world.y[torch.from_numpy(rows)]
        logits = predict(world, sent, local, rows)
        return -torch.nn.functional.cross_entropy(logits, y, reduction="none"), y

    if not len(member.train) or not len(member.test):
        return None
    return roc_auc_by_class(*scores(member.train), *scores(member.test))
