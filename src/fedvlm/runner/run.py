"""One run: settings -> federation -> engine -> evaluate -> record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.data.federation import Division
from fedvlm.data.table import Embedded
from fedvlm.engines.attackers import attackers
from fedvlm.engines.loop import open_engine, start
from fedvlm.errors import SettingsError
from fedvlm.evaluate import scores
from fedvlm.evaluate.protocols import Training
from fedvlm.record import DESCRIPTIONS, Record, read_manifest
from fedvlm.runner import calibrate, halves, tune, warm
from fedvlm.runner import memory as room
from fedvlm.runner.load import load, thin
from fedvlm.runner.look import look
from fedvlm.runner.prepare import Prepared, check_rows, own_data, prepare, template_of
from fedvlm.runner.provenance import provenance
from fedvlm.runner.settings import Settings, attack_of, build
from fedvlm.runner.training import carry_out, file_name, finished
from fedvlm.runner.withheld import withheld
from fedvlm.storage.files import slug
from fedvlm.storage.sealed import write_tensors

Progress = Callable[[str, int, int], None]  # what, done, total
SEEDED = (
    "noise is by the seed, so that the run can be repeated: it costs what a site's noise would, "
    "and hides nothing"
)
PARTS = ("train", "validation", "test")


def execute(
    settings: Settings,
    out: str | Path | None = None,
    again: bool = False,
    embedded: Embedded | None = None,
    progress: Progress | None = None,
    listen: Callable[[str, Any], None] | None = None,
    say: Callable[[str], None] = lambda note: None,  # is told what to know before it begins
) -> Record:
    report = progress or (lambda what, done, total: None)
    if embedded is not None and (settings.descriptions or settings.texts):
        raise SettingsError("rows in memory have their own descriptions and texts; set them there")
    folder = Path(out) if out else Path("runs") / default_name(settings, embedded)
    record = Record(folder, listen)
    if settings.tune:
        tune.check(settings)
    with record.lock():
        if settings.tune and (record.folder / "manifest.json").exists():
            settings = tune.known(settings, record.manifest)
        if record.result() is not None and not again:
            found: dict[str, Any] = {"identity": settings.identity()}
            if embedded is not None:
                found |= {"encoder": embedded.encoder, "rows": embedded.fingerprint}
            record.compare(found)
            say(f"already finished, read from {folder}; --again runs it")
            return record
        seeds = _begin(settings, record, again, embedded, report, say)
        tables = [_seed(one, record, report) for one in seeds]
        record.finish(tables)
    return record


def _begin(
    settings: Settings,
    record: Record,
    again: bool,
    embedded: Embedded | None,
    report: Progress,
    say: Callable[[str], None],
) -> list[Prepared]:
    """Every seed of a run, prepared; what it cannot do is refused before its record begins."""
    asked, memory = settings, embedded is not None
    rows, notes = (embedded, []) if embedded is not None else load(settings, report)
    if settings.smoke:
        settings, rows = thin(settings, rows)
    check_rows(settings, rows)
    seeds = [prepare(settings, rows, seed) for seed in settings.seeds]
    rows = seeds[0].rows  # base-to-new: with the classes that are trained on
    for one in seeds:
        one.check()
    tuned: dict[str, Any] = {}
    if settings.tune and not (record.folder / "manifest.json").exists():
        races = {one.seed: tune.race(one, report)[1] for one in seeds}
        tuned["tuned"] = tune.noted(races)
        asked = tune.known(asked, tuned)
    if settings.tune:
        known = tuned or record.manifest
        seeds = [replace(one, settings=tune.settled(settings, known, one.seed)) for one in seeds]
    if memory or own_data(settings):
        notes = [*notes, *look(rows, seeds[0].division)]
    notes = [*notes, *_notes(seeds)]
    for note in notes:
        say(note)
    apart = any(len(one.calibration) for one in seeds[0].division.members.values())
    parts = (*PARTS, "calibration") if apart else PARTS
    about = manifest(
        about_rows(rows),
        [one.name for one in seeds[0].trainings],
        {
            id: {part: len(getattr(one, part)) for part in parts}
            for id, one in seeds[0].division.members.items()
        },
        {one.seed: one.division.dropped for one in seeds},
    )
    about["counts"] = counts(rows, seeds[0].division)
    about["domains"] = seeds[0].division.domains
    about |= {"memory": memory, "reproduces": list(settings.reproduces), "notes": notes} | tuned
    record.begin({"identity": asked.identity(), **about})
    if again:
        record.clear()
    if rows.descriptions is not None:
        write_tensors(record.folder / DESCRIPTIONS, {"common": rows.descriptions}, {})
    return seeds


def _notes(seeds: Sequence[Prepared]) -> list[str]:
    """What the owner of a run should know of it beforehand: its memory, and what is held back."""
    first, notes = seeds[0], []
    settings, rows = first.settings, first.rows
    if rows.images is not None and settings.method.rounds:
        most = max(len(training.train) for one in seeds for training in one.trainings)
        notes.append(room.check(settings, first.frozen, rows.images.shape[1:], most))
    for method in (settings.warm_start, settings.method):
        notes += withheld(method, first.division.members, rows.labels, len(rows.classes))
    if settings.channel.noise or asdict(settings.method).get("noise_multiplier"):
        notes.append(SEEDED)
    if attack := attack_of(settings):
        for one in seeds:
            who = {id for each in one.trainings for id in attackers(attack, each.train, one.seed)}
            notes.append(f"{attack.kind} by {', '.join(sorted(who))} in seed {one.seed}")
    return notes


def resume(folder: str | Path, progress: Progress | None = None) -> Record:
    """Goes on where a run was stopped, however it was stopped; a finished run is just read."""
    path = Path(folder)
    manifest = read_manifest(path)
    if manifest["memory"] and Record(path).result() is None:
        raise SettingsError(f"{path} took its rows from memory; call fedvlm.run again with out= it")
    return execute(build(manifest["identity"]), path, progress=progress)


def _seed(prepared: Prepared, record: Record, report: Progress) -> scores.Table:
    """All trainings of one seed, and the numbers they add up to."""
    settings, trainings = prepared.settings, prepared.trainings
    rounds = max(1, settings.method.rounds)
    before = settings.seeds.index(prepared.seed) * len(trainings)
    total = len(settings.seeds) * len(trainings) * rounds
    done = {}
    for place, training in enumerate(trainings, start=before):

        def tell(finished: int, place: int = place) -> None:
            report(settings.method.name, place * rounds + finished, total)

        found = _train(prepared, training, record, tell)
        clients = (*training.train, *training.unseen)  # and not one that has everyone's rows
        mine = {id: found[id] for id in clients if id in found}
        if prepared.new is not None:
            tests = {id: one.test for id, one in prepared.new.members.items()}
            mine |= halves.scored(prepared.new_world(), record, training.name, tests)
        done[training.name] = (training, mine)
        tell(rounds)
    domains = prepared.division.domains
    return settings.rules().table(domains, done, prepared.generalises)


def _train(
    prepared: Prepared, training: Training, record: Record, tell: Callable[[int], None]
) -> scores.Results:
    """One training in this process, unless it is finished."""
    settings, name = prepared.settings, file_name(training, prepared.seed)
    if (scores := finished(record, name)) is not None:
        calibrate.keep(record, name, training.name, prepared.seed, prepared.world(training))
        return scores
    world = prepared.world(training)
    state, fresh = start(world)
    state = replace(state, channel=tune.begun(record.manifest, training.name, prepared.seed))
    if settings.warm_start is not None:
        before = prepared.warm_world(training)
        state = warm.begin(settings, training, before, world, state, record)
    engine = open_engine(settings.engine, world, settings.workers, settings.method.rounds)
    taught = prepared.taught(training)
    scores = carry_out(settings, taught, world, engine, state, fresh, record, tell)
    calibrate.keep(record, name, training.name, prepared.seed, world)
    return scores


def default_name(settings: Settings, embedded: Embedded | None) -> str:
    """The same settings always get the same directory, so a finished run is found again."""
    key = dumps([settings.identity(), embedded.fingerprint if embedded else ""], sort_keys=True)
    name = data_name(settings) if embedded is None else slug(embedded.name)
    return f"{settings.method.name}-{name}-{sha256(key.encode()).hexdigest()[:8]}"


def data_name(settings: Settings) -> str:
    """What the rows of a run are called in the name of a folder."""
    kind, _, place = settings.encoder.partition(":")
    return slug(Path(place).stem if kind == "store" else Path(settings.data).name)


def counts(rows: Embedded, division: Division) -> dict[str, list[int]]:
    """Training rows per class of each client."""
    return {
        id: np.bincount(rows.labels[one.train], minlength=len(rows.classes)).tolist()
        for id, one in division.members.items()
    }


def about_rows(rows: Embedded) -> dict[str, Any]:
    """What the manifest tells of rows and encoder."""
    return {
        "encoder": rows.encoder,
        "rows": rows.fingerprint,
        "data": rows.name,
        "classes": rows.classes,
        "dim": rows.x.shape[1],
        "scale": rows.scale,
        "text": None if rows.text is None else rows.text.tolist(),
    } | template_of(rows)


def manifest(
    about: Mapping[str, Any],
    trainings: Sequence[str],
    clients: Mapping[str, Mapping[str, int]],  # rows of each part
    dropped: Mapping[int, int],  # rows, by seed
) -> dict[str, Any]:
    """Everything a reader needs to know where the numbers come from."""
    return {
        **about,
        "trainings": list(trainings),
        "clients": dict(clients),
        "duplicates_dropped": dict(dropped),
        **provenance(),
    }
