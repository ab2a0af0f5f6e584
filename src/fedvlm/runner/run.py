"""One run: settings -> federation -> engine -> evaluate -> record."""

from collections.abc import Callable, Mapping
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.core import Frozen
from fedvlm.data.descriptions import dealt
from fedvlm.data.federation import Division, divide
from fedvlm.data.table import Embedded
from fedvlm.engines.client import World
from fedvlm.engines.loop import open_engine, start
from fedvlm.errors import DataError, SettingsError
from fedvlm.evaluate import protocols, reference, scores
from fedvlm.record import DESCRIPTIONS, Record, provenance
from fedvlm.runner import memory as room
from fedvlm.runner import warm
from fedvlm.runner.load import load, meet, thin
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import carry_out, finished, job_name
from fedvlm.runner.withheld import withheld
from fedvlm.storage.files import slug
from fedvlm.storage.sealed import read_json, write_json, write_tensors

Progress = Callable[[str, int, int], None]  # what, done, total


def execute(
    settings: Settings,
    out: str | Path | None = None,
    again: bool = False,
    embedded: Embedded | None = None,
    progress: Progress | None = None,
    listen: Callable[[str, Any], None] | None = None,
) -> Record:
    told = progress or (lambda what, done, total: None)
    if embedded is not None and (settings.descriptions or settings.texts):
        raise SettingsError("rows in memory have their own descriptions and texts; set them there")
    folder = Path(out) if out else Path("runs") / default_name(settings, embedded)
    record = Record(folder, listen)
    identity = settings.identity()
    with record.lock():
        if record.result() is not None and not again:
            found: dict[str, Any] = {"identity": identity}
            if embedded is not None:
                found |= {"encoder": embedded.encoder, "rows": embedded.fingerprint}
            record.compare(found)
            return record
        rows, notes = (embedded, []) if embedded is not None else load(settings, told)
        if settings.smoke:
            settings, rows = thin(settings, rows)
        check(settings, rows)
        divisions = {
            seed: divide(rows, settings.clients, seed, settings.target) for seed in settings.seeds
        }
        for seed, division in divisions.items():
            for job in jobs_of(settings, division, seed):
                reference.check(settings.method, rows, division, job)
        if rows.pictures is not None and settings.method.rounds:
            jobs = (job for seed in divisions for job in jobs_of(settings, divisions[seed], seed))
            most = max(len(job.train) for job in jobs)
            ready = frozen(rows, settings.seeds[0])
            notes = [*notes, room.check(settings, ready, rows.pictures.shape[1:], most)]
        about = manifest(settings, rows, divisions)
        about["counts"] = counts(rows, next(iter(divisions.values())))
        members = divisions[settings.seeds[0]].members
        for one in (settings.warm_start, settings.method):
            notes = [*notes, *withheld(one, members, rows.labels, len(rows.classes))]
        memory = embedded is not None
        record.begin({"identity": identity, "memory": memory, "notes": notes, **about})
        if again:
            record.clear()
        if rows.descriptions is not None:
            write_tensors(record.folder / DESCRIPTIONS, {"common": rows.descriptions}, {})
        tables = [
            _seed(settings, rows, division, seed, record, told)
            for seed, division in divisions.items()
        ]
        write_json(folder / "result.json", {"tables": tables})
    return record


def resume(folder: str | Path, progress: Progress | None = None) -> Record:
    """Goes on where a run was stopped, however it was stopped; a finished run is just read."""
    path = Path(folder)
    told = read_json(path / "manifest.json")
    if told["memory"] and Record(path).result() is None:
        raise SettingsError(f"{path} took its rows from memory; call fedvlm.run again with out= it")
    return execute(build(told["identity"]), path, progress=progress)


def check(settings: Settings, rows: Embedded) -> None:
    """Refuses rows no method can use, before any work."""
    # A sum is finite only if all its numbers are, and takes no second copy of the rows.
    bad = (~rows.x.sum(dim=1).isfinite()).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"{len(bad)} embeddings hold NaN or infinite numbers, the first in row {bad[0]}; "
            "encode them again, or leave those rows out"
        )
    outside = [i for i in set(rows.labels.tolist()) if not 0 <= i < len(rows.classes)]
    if outside:
        raise DataError(
            f"label {outside[0]} is outside the {len(rows.classes)} classes (0 to "
            f"{len(rows.classes) - 1}); correct the labels, or name every class"
        )
    meet(settings.method, rows.encoder, rows.offers())
    ready = frozen(rows, settings.seeds[0])
    settings.method.init(ready)  # a method may refuse the dimension
    if settings.warm_start is not None:
        meet(settings.warm_start, rows.encoder, rows.offers())
        warm.check(settings.warm_start, settings.method, ready)


def _seed(
    settings: Settings,
    rows: Embedded,
    division: Division,
    seed: int,
    record: Record,
    told: Progress,
) -> scores.Table:
    """All trainings of one seed, and the numbers they add up to."""
    jobs = jobs_of(settings, division, seed)
    rounds = max(1, settings.method.rounds)
    before = settings.seeds.index(seed) * len(jobs)
    total = len(settings.seeds) * len(jobs) * rounds
    done = {}
    for place, job in enumerate(jobs, start=before):

        def tell(finished: int, place: int = place) -> None:
            told(settings.method.name, place * rounds + finished, total)

        done[job.name] = (job, _job(settings, rows, division, job, seed, record, tell))
        tell(rounds)
    # An unseen client of a method that trains but shares nothing has learnt nothing.
    shared, _ = settings.method.init(frozen(rows, seed))
    generalises = bool(shared) or settings.method.rounds == 0
    return protocols.table(settings.protocol, division.members, done, generalises)


def jobs_of(settings: Settings, division: Division, seed: int) -> list[protocols.Job]:
    return protocols.jobs(
        settings.protocol,
        division.members,
        counts=settings.counts,
        unseen=settings.unseen,
        target=settings.target,
        seed=seed,
    )


def frozen(rows: Embedded, seed: int) -> Frozen:
    return Frozen(
        rows.classes,
        rows.x.shape[1],
        rows.scale,
        rows.text,
        seed,
        rows.text_tower,
        rows.image_tower,
        rows.descriptions,
    )


def world_of(
    settings: Settings, rows: Embedded, division: Division, job: protocols.Job, seed: int
) -> World:
    """All that one training works on."""
    members = {id: division.members[id] for id in (*job.train, *job.unseen)}
    return World(
        settings.method,
        frozen(rows, seed),
        rows.view(settings.method.needs),
        torch.from_numpy(rows.labels),
        members,
        seed,
        reference.reference(settings.method, division, job),
        dealt(rows.texts, division.members),
        channel=settings.channel,
        metrics=settings.protocol == "source-target",
        details=True,
    )


def _job(
    settings: Settings,
    rows: Embedded,
    division: Division,
    job: protocols.Job,
    seed: int,
    record: Record,
    tell: Callable[[int], None],
) -> scores.Results:
    """One training in this process, unless it is finished."""
    if (scores := finished(record, job_name(job, seed))) is not None:
        return scores
    world = world_of(settings, rows, division, job, seed)
    state, fresh = start(world)
    if settings.warm_start is not None:
        state = warm.begin(
            settings, rows.view(settings.warm_start.needs), job, world, state, record
        )
    engine = open_engine(settings.engine, world, settings.workers, settings.method.rounds)
    return carry_out(settings, job, world, engine, state, fresh, record, tell)


def default_name(settings: Settings, embedded: Embedded | None) -> str:
    """The same settings always get the same directory, so a finished run is found again."""
    key = dumps([settings.identity(), embedded.fingerprint if embedded else ""], sort_keys=True)
    data = slug(Path(settings.data).name if embedded is None else embedded.name)
    return f"{settings.method.name}-{data}-{sha256(key.encode()).hexdigest()[:8]}"


def counts(rows: Embedded, division: Division) -> dict[str, list[int]]:
    """Training rows per class of each client."""
    return {
        id: np.bincount(rows.labels[one.train], minlength=len(rows.classes)).tolist()
        for id, one in division.members.items()
    }


def manifest(
    settings: Settings, rows: Embedded, divisions: Mapping[int, Division]
) -> dict[str, Any]:
    """Everything a reader needs to know where the numbers come from."""
    seed, division = next(iter(divisions.items()))
    return {
        "encoder": rows.encoder,
        "rows": rows.fingerprint,
        "data": rows.name,
        "classes": rows.classes,
        "dim": rows.x.shape[1],
        "scale": rows.scale,
        "text": None if rows.text is None else rows.text.tolist(),
        "jobs": [job.name for job in jobs_of(settings, division, seed)],
        "clients": {
            id: {part: len(getattr(one, part)) for part in ("train", "validation", "test")}
            for id, one in division.members.items()
        },
        "duplicates_dropped": {seed: one.dropped for seed, one in divisions.items()},
        **provenance(),
    }
