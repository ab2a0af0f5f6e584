"""The beginning of a run: its rows, its seeds prepared, and a record that says where it is from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fedvlm.data.federation import Division
from fedvlm.data.table import Embedded
from fedvlm.engines.attackers import attackers
from fedvlm.machine import give_back
from fedvlm.record import DESCRIPTIONS, Record
from fedvlm.runner import memory as room
from fedvlm.runner import tune
from fedvlm.runner.load import Loader, Progress, thin
from fedvlm.runner.look import look
from fedvlm.runner.prepare import Prepared, check_rows, own_data, prepare, template_of
from fedvlm.runner.provenance import places, provenance, usual
from fedvlm.runner.races import races
from fedvlm.runner.settings import Settings, attack_of
from fedvlm.runner.withheld import withheld
from fedvlm.storage.sealed import write_tensors

SEEDED = (
    "noise is by the seed, so that the run can be repeated: it costs what a site's noise would, "
    "and hides nothing"
)
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Need:
    """What a run is begun with beside its settings."""

    record: Record
    again: bool
    embedded: Embedded | None  # rows in memory
    load: Loader
    report: Progress
    say: Callable[[str], None]


def begin(settings: Settings, need: Need) -> list[Prepared]:
    """Every seed of a run, prepared; what it cannot do is refused before its record begins."""
    record, embedded, report = need.record, need.embedded, need.report
    asked, memory = settings, embedded is not None
    rows, notes = (embedded, []) if embedded is not None else need.load(settings, report)
    if settings.smoke:
        settings, rows = thin(settings, rows)
    check_rows(settings, rows)
    seeds = [prepare(settings, rows, seed) for seed in settings.seeds]
    rows = seeds[0].rows  # base-to-new: with the classes that are trained on
    for one in seeds:
        one.check()
    tuned: dict[str, Any] = {}
    if settings.tune and not (record.folder / "manifest.json").exists():
        tuned["tuned"] = tune.noted(races(seeds, record, report))
        asked = tune.known(asked, tuned)
    if settings.tune:
        known = tuned or record.manifest
        seeds = [replace(one, settings=tune.settled(settings, known, one.seed)) for one in seeds]
    if memory or own_data(settings):
        notes = [*notes, *look(rows, seeds[0].division)]
    notes = [*notes, *_notes(seeds)]
    for note in notes:
        need.say(note)
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
    about |= {"usual": usual(settings.method), "devices": places(settings, memory)}
    about |= {"memory": memory, "reproduces": list(settings.reproduces), "notes": notes} | tuned
    record.begin({"identity": asked.identity(), **about})
    if need.again:
        record.clear()
    if rows.descriptions is not None:
        write_tensors(record.folder / DESCRIPTIONS, {"common": rows.descriptions}, {})
    give_back()  # of many rows, what dividing them took
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
    if settings.channel.noise_multiplier or asdict(settings.method).get("noise_multiplier"):
        notes.append(SEEDED)
    if attack := attack_of(settings):
        for one in seeds:
            who = {id for each in one.trainings for id in attackers(attack, each.train, one.seed)}
            notes.append(f"{attack.kind} by {', '.join(sorted(who))} in seed {one.seed}")
    return notes


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
