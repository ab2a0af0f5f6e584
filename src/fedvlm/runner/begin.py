"""The beginning of a run: its rows, its seeds prepared, and a record that says where it is from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fedvlm.data.partition import Partition
from fedvlm.data.table import EmbeddedTable
from fedvlm.engines.client import choose_attackers
from fedvlm.machine import release_memory
from fedvlm.record import DESCRIPTIONS_FILE, Record
from fedvlm.runner import memory as room
from fedvlm.runner import tune
from fedvlm.runner.load import Loader, Progress, shrink_for_smoke
from fedvlm.runner.look import data_warnings
from fedvlm.runner.prepare import Prepared, check_samples, own_data, prepare, template_of
from fedvlm.runner.provenance import default_values, device_info, provenance
from fedvlm.runner.races import tune_seeds
from fedvlm.runner.settings import Settings, attack_of
from fedvlm.runner.withheld import suppressed_warnings
from fedvlm.storage.files import write_tensors

SEEDED_NOISE_NOTE = (
    "noise is by the seed, so that the run can be repeated: it costs what a site's noise would, and hides nothing"
)
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class RunContext:
    """What a run is begun with beside its settings."""

    record: Record
    again: bool
    embedded: EmbeddedTable | None  # rows in memory
    load: Loader
    report: Progress
    log: Callable[[str], None]


def begin_run(settings: Settings, context: RunContext) -> list[Prepared]:
    """Every seed of a run, prepared; what it cannot do is refused before its record begins."""
    record, embedded, report = context.record, context.embedded, context.report
    recorded_settings, memory = settings, embedded is not None
    rows, notes = (embedded, []) if embedded is not None else context.load(settings, report)
    if settings.smoke:
        settings, rows = shrink_for_smoke(settings, rows)
    check_samples(settings, rows)
    seeds = [prepare(settings, rows, seed) for seed in settings.seeds]
    rows = seeds[0].rows  # base-to-new: with the classes that are trained on
    for prepared in seeds:
        prepared.check()
    tuned: dict[str, Any] = {}
    if settings.tune and not (record.folder / "manifest.json").exists():
        tuned["tuned"] = tune.to_manifest(tune_seeds(seeds, record, report))
        recorded_settings = tune.reuse_tuned(recorded_settings, tuned)
    if settings.tune:
        tuned_manifest = tuned or record.manifest
        seeds = [
            replace(prepared, settings=tune.with_tuned(settings, tuned_manifest, prepared.seed)) for prepared in seeds
        ]
    if memory or own_data(settings):
        notes = [*notes, *data_warnings(rows, seeds[0].partition)]
    notes = [*notes, *_run_warnings(seeds)]
    for message in notes:
        context.log(message)
    has_calibration = any(len(prepared.calibration) for prepared in seeds[0].partition.clients.values())
    parts = (*PARTS, "calibration") if has_calibration else PARTS
    about = build_manifest(
        describe_samples(rows),
        [prepared.name for prepared in seeds[0].trainings],
        {
            id: {part: len(getattr(prepared, part)) for part in parts}
            for id, prepared in seeds[0].partition.clients.items()
        },
        {prepared.seed: prepared.partition.dropped for prepared in seeds},
    )
    about["counts"] = class_counts(rows, seeds[0].partition)
    about["domains"] = seeds[0].partition.domains
    about |= {"usual": default_values(settings.method), "devices": device_info(settings, memory)}
    about |= {"memory": memory, "reproduces": list(settings.reproduces), "notes": notes} | tuned
    record.start({"identity": recorded_settings.identity(), **about})
    if context.again:
        record.clear()
    if rows.descriptions is not None:
        write_tensors(record.folder / DESCRIPTIONS_FILE, {"common": rows.descriptions}, {})
    release_memory()  # of many rows, what dividing them took
    return seeds


def _run_warnings(seeds: Sequence[Prepared]) -> list[str]:
    """What the owner of a run should know of it beforehand: its memory, and what is held back."""
    first, notes = seeds[0], []
    settings, rows = first.settings, first.rows
    if rows.images is not None and settings.method.rounds:
        max_clients = max(len(training.train) for prepared in seeds for training in prepared.trainings)
        notes.append(room.check_memory(settings, first.frozen, rows.images.shape[1:], max_clients))
    for method in (settings.warm_start, settings.method):
        notes += suppressed_warnings(method, first.partition.clients, rows.labels, len(rows.classes))
    if settings.channel.noise_multiplier or asdict(settings.method).get("noise_multiplier"):
        notes.append(SEEDED_NOISE_NOTE)
    if attack := attack_of(settings):
        for prepared in seeds:
            attacker_ids = {
                id
                for seed_training in prepared.trainings
                for id in choose_attackers(attack, seed_training.train, prepared.seed)
            }
            notes.append(f"{attack.kind} by {', '.join(sorted(attacker_ids))} in seed {prepared.seed}")
    return notes


def class_counts(rows: EmbeddedTable, partition: Partition) -> dict[str, list[int]]:
    """Training rows per class of each client."""
    return {
        id: np.bincount(rows.labels[member.train], minlength=len(rows.classes)).tolist()
        for id, member in partition.clients.items()
    }


def describe_samples(rows: EmbeddedTable) -> dict[str, Any]:
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


def build_manifest(
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
