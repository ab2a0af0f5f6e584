"""Runs: settings -> federation -> engine -> evaluate -> record, one of them or many together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from fedvlm.data.table import EmbeddedTable
from fedvlm.engines.client import choose_attackers
from fedvlm.errors import SettingsError, join_names
from fedvlm.evaluate import metrics
from fedvlm.evaluate.protocols import Training
from fedvlm.machine import release_memory
from fedvlm.record import DESCRIPTIONS_FILE, Record, read_manifest
from fedvlm.runner import cluster, tune
from fedvlm.runner.data_warnings import data_warnings, suppressed_warnings
from fedvlm.runner.forecast import check_memory, training_time
from fedvlm.runner.jobs import Job, JobSpec, ProgressTotal, must_run_alone, run_jobs
from fedvlm.runner.load import Loader, Progress, shrink_for_smoke
from fedvlm.runner.manifest import build_manifest, class_counts, default_values, describe_samples, device_info
from fedvlm.runner.prepare import Prepared, check_samples, own_data, prepare, score_new_classes
from fedvlm.runner.settings import Settings, attack_of, build
from fedvlm.runner.training import file_name, finished_scores, train
from fedvlm.runner.tune import tune_seeds
from fedvlm.storage.files import data_name, slug, write_tensors

MAX_OPEN_RUNS = 64  # runs that are begun together: each holds the lock of its record


@dataclass(frozen=True)
class RunContext:
    """What a run is begun with beside its settings."""

    record: Record
    again: bool
    embedded: EmbeddedTable | None  # rows in memory
    load: Loader
    report: Progress
    log: Callable[[str], None]


def execute(
    settings: Settings,
    out: str | Path | None = None,
    again: bool = False,
    embedded: EmbeddedTable | None = None,
    progress: Progress | None = None,
    listen: Callable[[str, Any], None] | None = None,
    log: Callable[[str], None] = lambda message: None,  # is told what to know before it begins
) -> Record:
    folder = Path(out) if out else Path("runs") / default_name(settings, embedded)
    (outcome,) = execute_all([(settings, folder)], again, embedded, progress, listen, log)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def execute_all(
    requests: Sequence[tuple[Settings, Path]],  # of each run, and its folder
    again: bool = False,
    embedded: EmbeddedTable | None = None,
    progress: Progress | None = None,
    listen: Callable[[str, Any], None] | None = None,
    log: Callable[[str], None] = lambda message: None,
    keep_going: bool = False,
    on: str = "",  # a cluster: dask, dask://HOST:PORT
) -> list[Record | Exception]:
    """The trainings of all runs in one schedule; for each run its record, or what hindered it.

    One that cannot begin is raised at once, unless the others are to endure it.
    """
    report = progress or (lambda task, done, total: None)
    settings_by_folder = {folder: settings for settings, folder in requests}  # one may be asked for twice
    out: dict[Path, Record | Exception] = {}
    load = Loader()
    for first in range(0, len(settings_by_folder), MAX_OPEN_RUNS):
        tally = ProgressTotal(report)
        runs: dict[Path, _Run | Record | Exception] = {}
        with ExitStack() as locks:
            for folder, settings in list(settings_by_folder.items())[first : first + MAX_OPEN_RUNS]:
                record = Record(folder, listen)
                run_lock = locks.enter_context(ExitStack())
                try:
                    context = RunContext(record, again, embedded, load, report, log)
                    run = _open_run(settings, context, run_lock)
                    runs[folder] = run
                except Exception as error:  # of any kind: the others are no worse for it
                    run_lock.close()
                    if not keep_going:
                        raise
                    runs[folder] = error
            open_ = [entry for entry in runs.values() if isinstance(entry, _Run)]
            jobs = [job for entry in open_ for job in entry.jobs(tally)]
            if on:
                cluster.run_jobs(jobs, on)
            else:
                run_jobs(jobs)
        for folder, entry in runs.items():
            out[folder] = entry.outcome if isinstance(entry, _Run) else entry
    return [out[folder] for _, folder in requests]


@dataclass
class _Run:
    """A run that has begun, until its last training is done."""

    record: Record
    seeds: Sequence[Prepared]
    lock: ExitStack
    outcomes: dict[tuple[int, str], metrics.Results | Exception] = field(default_factory=dict)

    def jobs(self, tally: ProgressTotal) -> Iterator[Job]:
        settings = self.seeds[0].settings
        rounds = max(1, settings.method.rounds)
        for prepared in self.seeds:
            for training in prepared.trainings:
                yield self._job(prepared, training, tally.add(settings.method.name, rounds))

    def _job(self, prepared: Prepared, training: Training, report_rounds: Callable[[int], None]) -> Job:
        settings, name = prepared.settings, file_name(training, prepared.seed)
        is_finished = finished_scores(self.record, name) is not None

        def work(record: Record, workers: int, report_rounds: Callable[[int], None]) -> metrics.Results:
            worker_prepared = replace(prepared, settings=replace(settings, workers=workers))
            return train(worker_prepared, training, record, report_rounds)

        def done(outcome: metrics.Results | Exception) -> None:
            self.outcomes[prepared.seed, training.name] = outcome
            report_rounds(max(1, settings.method.rounds))
            if len(self.outcomes) == sum(len(seed_run.trainings) for seed_run in self.seeds):
                self._finish()

        return Job(
            name=f"{settings.method.name}, training {name}",
            record=self.record,
            cost=0.0 if is_finished else training_time(prepared, training),
            workers=settings.workers,
            is_exclusive=must_run_alone(settings) or is_finished,
            work=work,
            report_rounds=report_rounds,
            on_done=done,
            spec=JobSpec(settings, prepared.source_samples, prepared.seed, training.name),
        )

    def _finish(self) -> None:
        if not self._failed:
            pairs = [(prepared, training) for prepared in self.seeds for training in prepared.trainings]
            self.record.sort_lines([file_name(training, prepared.seed) for prepared, training in pairs])
            self.record.finish([self._table(prepared) for prepared in self.seeds])
        self.lock.close()

    def _table(self, prepared: Prepared) -> metrics.Table:
        """The numbers that the trainings of one seed add up to."""
        done = {}
        for training in prepared.trainings:
            client_scores = self.outcomes[prepared.seed, training.name]
            assert not isinstance(client_scores, Exception)
            clients = (*training.train, *training.unseen)  # and not one that has everyone's rows
            training_scores = {id: client_scores[id] for id in clients if id in client_scores}
            if prepared.new is not None:
                training_scores |= score_new_classes(prepared.new_world(), self.record, training.name)
            done[training.name] = (training, training_scores)
        rules, domains = prepared.settings.rules(), prepared.partition.domains
        return rules.table(domains, done, prepared.generalises)

    @property
    def _failed(self) -> list[Exception]:
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, Exception)]

    @property
    def outcome(self) -> Record | Exception:
        return self._failed[0] if self._failed else self.record


def _open_run(settings: Settings, context: RunContext, lock: ExitStack) -> _Run | Record:
    """A run that has begun, or the record of one that is finished."""
    record, embedded = context.record, context.embedded
    if embedded is not None and (settings.descriptions or settings.texts):
        raise SettingsError("rows in memory have their own descriptions and texts; set them there")
    if settings.tune:
        tune.check_tunable(settings)
    lock.enter_context(record.lock())
    if settings.tune and (record.folder / "manifest.json").exists():
        settings = tune.reuse_tuned(settings, record.manifest)
    if record.result() is not None and not context.again:
        current: dict[str, Any] = {"identity": settings.identity()}
        if embedded is not None:
            current |= {"encoder": embedded.encoder, "rows": embedded.fingerprint}
        record.compare(current)
        lock.close()
        context.log(f"already finished, read from {record.folder}; --force re-runs it")
        return record
    seeds = begin_run(settings, context)
    cluster.collect_lost_trainings(record)
    return _Run(record, seeds, lock)


def resume(folder: str | Path, progress: Progress | None = None) -> Record:
    """Goes on where a run was stopped, however it was stopped; a finished run is just read."""
    path = Path(folder)
    if not (path / "manifest.json").exists() and (
        runs := sorted(str(manifest_path.parent) for manifest_path in path.glob("*/manifest.json"))
    ):
        raise SettingsError(
            f"{path} is an experiment; the command that began it goes on with all of it, and "
            f"resume with one of {join_names(runs)}"
        )
    manifest = read_manifest(path)
    if manifest["memory"] and Record(path).result() is None:
        raise SettingsError(f"{path} took its rows from memory; call fedvlm.run again with out= it")
    return execute(build(manifest["identity"]), path, progress=progress)


def default_name(settings: Settings, embedded: EmbeddedTable | None) -> str:
    """The same settings always get the same directory, so a finished run is found again."""
    key = dumps([settings.identity(), embedded.fingerprint if embedded else ""], sort_keys=True)
    name = data_name(settings.data, settings.encoder) if embedded is None else slug(embedded.name)
    return f"{settings.method.name}-{name}-{sha256(key.encode()).hexdigest()[:8]}"


SEEDED_NOISE_NOTE = (
    "noise is by the seed, so that the run can be repeated: it costs what a site's noise would, and hides nothing"
)
PARTS = ("train", "validation", "test")


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
        notes.append(check_memory(settings, first.frozen, rows.images.shape[1:], max_clients))
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
