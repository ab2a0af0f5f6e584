"""Execute runs: open each one, prepare and tune it, run its trainings as jobs, and finish its record."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.core import MIN_CLASS_SAMPLES, make, setting, tunable_settings
from fedvlm.data.table import EmbeddedTable
from fedvlm.engines.client import choose_attackers, member_rows
from fedvlm.errors import DataError, SettingsError, join_names
from fedvlm.evaluate.metrics import Results, Table
from fedvlm.evaluate.protocols import Training
from fedvlm.machine import release_memory
from fedvlm.record import DESCRIPTIONS_FILE, Record, read_manifest
from fedvlm.runner.data_warnings import data_warnings, suppressed_warnings, unlabelled_warnings
from fedvlm.runner.forecast import check_memory, training_time
from fedvlm.runner.jobs import Job, JobSpec, ProgressTotal, must_run_alone, run_jobs
from fedvlm.runner.load import Loader, Progress, load, shrink_for_smoke
from fedvlm.runner.manifest import run_manifest
from fedvlm.runner.prepare import (
    Prepared,
    check_samples,
    label_keys,
    label_tensor,
    own_data,
    prepare,
    score_new_classes,
)
from fedvlm.runner.settings import Settings, attack_of, build
from fedvlm.runner.training import collect_lost_trainings, file_name, finished_scores, train
from fedvlm.runner.tune import check_tunable, reuse_tuned, to_manifest, tune_seeds, with_tuned
from fedvlm.storage.files import data_name, slug, write_tensors

Outcomes = dict[Path, Record | Exception]
MAX_OPEN_RUNS = 64  # each holds the lock of its record
SEEDED_NOISE_NOTE = "the noise is drawn from the seed, so that the run can be repeated: it protects nothing"


@dataclass(frozen=True)
class RunOptions:
    """How runs are executed; nothing here changes a number."""

    again: bool = False  # re-run even if a finished result exists
    embedded: EmbeddedTable | None = None  # samples in memory, instead of `data` and `encoder`
    progress: Progress | None = None
    on_line: Callable[[str, Any], None] | None = None  # gets the run's name and each line of its record
    log: Callable[[str], None] = lambda message: None
    warn: Callable[[str], None] | None = None  # for warnings about the data; `log` if left out
    keep_going: bool = False  # a run that cannot begin does not stop the others
    cluster: str = ""  # dask, dask://HOST:PORT
    history: Sequence[Mapping[str, Any]] = ()  # versions that the run was grown from, and what changed

    def report(self, task: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(task, done, total)


def execute(settings: Settings, out: str | Path | None = None, **options: Any) -> Record:
    """Execute one run; `options` are fields of RunOptions."""
    folder = Path(out) if out else Path("runs") / default_name(settings, options.get("embedded"))
    (outcome,) = execute_all([(settings, folder)], **options)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def execute_all(requests: Sequence[tuple[Settings, Path]], **options: Any) -> list[Record | Exception]:
    """Execute runs, given by settings and folder, with all their trainings as jobs of one queue.

    Return the record of each run, or the error that stopped it. A run that cannot begin raises its error at once,
    unless `keep_going`. Further `options` are fields of RunOptions.
    """
    run_options = RunOptions(**options)
    if run_options.cluster:
        from fedvlm.runner.cluster import parse_address

        parse_address(run_options.cluster)  # refuse a wrong one also if all runs are finished
    load = Loader()
    settings_of = {folder: settings for settings, folder in requests}  # a run may be requested twice
    folders = list(settings_of)
    outcomes: dict[Path, Record | Exception] = {}
    for start in range(0, len(folders), MAX_OPEN_RUNS):
        chunk = {folder: settings_of[folder] for folder in folders[start : start + MAX_OPEN_RUNS]}
        outcomes |= _execute_chunk(chunk, load, run_options)
    return [outcomes[folder] for _, folder in requests]


def _execute_chunk(settings_of: Mapping[Path, Settings], load: Loader, options: RunOptions) -> Outcomes:
    tally = ProgressTotal(options.report)
    outcomes: Outcomes = {}
    runs: dict[Path, _Run] = {}
    with ExitStack() as locks:
        for folder, settings in settings_of.items():
            lock = locks.enter_context(ExitStack())
            try:
                opened = _open_run(settings, Record(folder, options.on_line), load, options, lock)
            except Exception as error:  # of any kind: the other runs are not affected
                lock.close()
                if not options.keep_going:
                    raise
                outcomes[folder] = error
                continue
            if isinstance(opened, _Run):
                runs[folder] = opened
            else:
                outcomes[folder] = opened
        jobs = [job for run in runs.values() for job in run.jobs(tally)]
        if options.cluster:
            from fedvlm.runner import cluster

            cluster.run_jobs(jobs, options.cluster)
        else:
            run_jobs(jobs)
    return outcomes | {folder: run.outcome for folder, run in runs.items()}


def _open_run(
    settings: Settings, record: Record, load: Loader, options: RunOptions, lock: ExitStack
) -> "_Run | Record":
    """Lock a record and begin or continue its run; return the record of a finished run."""
    embedded = options.embedded
    if embedded is not None and (settings.descriptions or settings.texts):
        raise SettingsError("samples in memory have their own descriptions and texts; set them there")
    if settings.tune:
        check_tunable(settings)
    lock.enter_context(record.lock())
    if settings.tune and _has_manifest(record):
        settings = reuse_tuned(settings, record.manifest)
    if record.result() is not None and not options.again:
        current: dict[str, Any] = {"identity": settings.identity()}
        if (samples := _embedded_samples(settings, load, options)) is not None:
            current |= {"encoder": samples.encoder, "rows": samples.fingerprint}
        record.compare(current)
        lock.close()
        options.log(f"already finished, read from {record.folder}; --force re-runs it")
        return record
    seeds, warnings = _prepare_seeds(settings, load, options)
    seeds, settings, tuned = _tune(seeds, settings, record, options.report)
    _begin_record(seeds, settings, record, warnings, tuned, options)
    collect_lost_trainings(record)
    return _Run(record, seeds, lock)


def _embedded_samples(settings: Settings, load: Loader, options: RunOptions) -> EmbeddedTable | None:
    """Return samples that need no encoder: those in memory, or of a table that is still there."""
    kind, _, file = settings.encoder.partition(":")
    if options.embedded is None and kind == "store" and Path(file).exists():
        return load(settings, options.report)[0]
    return options.embedded


def _has_manifest(record: Record) -> bool:
    return (record.folder / "manifest.json").exists()


def _prepare_seeds(settings: Settings, load: Loader, options: RunOptions) -> tuple[list[Prepared], list[str]]:
    """Load and check the samples and prepare every seed; also return warnings about the data."""
    samples, warnings = (options.embedded, []) if options.embedded is not None else load(settings, options.report)
    if settings.smoke:
        settings, samples = shrink_for_smoke(settings, samples)
    check_samples(settings, samples)
    seeds = [prepare(settings, samples, seed) for seed in settings.seeds]
    for prepared in seeds:
        prepared.check()
    first = seeds[0]
    if options.embedded is not None or own_data(settings):
        warnings = [*warnings, *data_warnings(first.rows, first.partition)]
    warnings = [*warnings, *unlabelled_warnings(settings.method, first.partition)]
    for method in (settings.warm_start, settings.method):
        warnings = [*warnings, *suppressed_warnings(method, first.partition.clients, first.rows)]
    return seeds, warnings


def _tune(
    seeds: list[Prepared], settings: Settings, record: Record, progress: Progress
) -> tuple[list[Prepared], Settings, dict[str, Any]]:
    """Return the seeds and the settings with tuned values, and the search for the manifest if it is a new one."""
    if not settings.tune:
        return seeds, settings, {}
    tuned: dict[str, Any] = {}
    if not _has_manifest(record):
        tuned["tuned"] = to_manifest(tune_seeds(seeds, record, progress))
        settings = reuse_tuned(settings, tuned)
    chosen = tuned or record.manifest
    seeds = [replace(entry, settings=with_tuned(entry.settings, chosen, entry.seed)) for entry in seeds]
    return seeds, settings, tuned


def _begin_record(
    seeds: Sequence[Prepared],
    settings: Settings,
    record: Record,
    warnings: Sequence[str],
    tuned: Mapping[str, Any],
    options: RunOptions,
) -> None:
    notes = _run_notes(seeds)
    for message in warnings:
        (options.warn or options.log)(message)
    for message in [*notes, *_untuned_note(settings, options)]:
        options.log(message)
    manifest = run_manifest(seeds, in_memory=options.embedded is not None)
    history = {"history": list(options.history)} if options.history else {}
    record.start({"identity": settings.identity(), **manifest, "notes": [*warnings, *notes], **tuned, **history})
    if options.again:
        record.clear()
    descriptions = seeds[0].rows.descriptions
    if descriptions is not None:
        write_tensors(record.folder / DESCRIPTIONS_FILE, {"common": descriptions}, {})
    release_memory()  # that the partition of many samples took


def _run_notes(seeds: Sequence[Prepared]) -> list[str]:
    """Describe the memory a run takes, its simulated noise and its attackers."""
    first, notes = seeds[0], []
    settings, samples = first.settings, first.rows
    if samples.images is not None and settings.method.rounds:
        max_clients = max(len(training.train) for prepared in seeds for training in prepared.trainings)
        notes.append(check_memory(settings, first.frozen, samples.images.shape[1:], max_clients))
    if settings.channel.noise_multiplier or asdict(settings.method).get("noise_multiplier"):
        notes.append(SEEDED_NOISE_NOTE)
    if attack := attack_of(settings):
        for prepared in seeds:
            ids = {id for entry in prepared.trainings for id in choose_attackers(attack, entry.train, prepared.seed)}
            notes.append(f"attack {attack.kind} by {', '.join(sorted(ids))} in seed {prepared.seed}")
    return notes


def _untuned_note(settings: Settings, options: RunOptions) -> list[str]:
    """Point to `tune` if a method trains on a user's own data with its default learning rate."""
    method = settings.method
    if settings.tune or not method.rounds or not (options.embedded is not None or own_data(settings)):
        return []
    values = asdict(method)
    if "lr" not in tunable_settings(method) or values["lr"] != asdict(make(method.name))["lr"]:
        return []
    hint = "tune = ['lr'] (--tune lr) chooses it on validation samples"
    return [f"{method.name}: lr = {values['lr']:g} is the default and was not tuned on these data; {hint}"]


@dataclass
class _Run:
    """A run whose record is open, until its last training is done."""

    record: Record
    seeds: Sequence[Prepared]
    lock: ExitStack
    outcomes: dict[tuple[int, str], Results | Exception] = field(default_factory=dict)

    def jobs(self, tally: ProgressTotal) -> Iterator[Job]:
        method = self.seeds[0].settings.method
        for prepared in self.seeds:
            for training in prepared.trainings:
                yield self._job(prepared, training, tally.add(method.name, max(1, method.rounds)))

    def _job(self, prepared: Prepared, training: Training, report_rounds: Callable[[int], None]) -> Job:
        settings, name = prepared.settings, file_name(training, prepared.seed)
        is_finished = finished_scores(self.record, name) is not None

        def work(record: Record, workers: int, report_rounds: Callable[[int], None]) -> Results:
            worker_prepared = replace(prepared, settings=replace(settings, workers=workers))
            return train(worker_prepared, training, record, report_rounds)

        def on_done(outcome: Results | Exception) -> None:
            self.outcomes[prepared.seed, training.name] = outcome
            report_rounds(max(1, settings.method.rounds))
            if len(self.outcomes) == sum(len(seed.trainings) for seed in self.seeds):
                self._finish()

        return Job(
            name=f"{settings.method.name}, training {name}",
            record=self.record,
            cost=0.0 if is_finished else training_time(prepared, training),
            workers=settings.workers,
            is_exclusive=must_run_alone(settings) or is_finished,
            work=work,
            report_rounds=report_rounds,
            on_done=on_done,
            spec=JobSpec(settings, prepared.source_samples, prepared.seed, training.name),
        )

    def _finish(self) -> None:
        if not self._errors:
            names = [file_name(training, seed.seed) for seed in self.seeds for training in seed.trainings]
            self.record.sort_lines(names)
            self.record.finish([self._table(prepared) for prepared in self.seeds])
        self.lock.close()

    def _table(self, prepared: Prepared) -> Table:
        """Return the numbers that the protocol makes of the trainings of one seed."""
        done = {}
        for training in prepared.trainings:
            outcome = self.outcomes[prepared.seed, training.name]
            assert not isinstance(outcome, Exception)
            ids = (*training.train, *training.unseen)  # without the client that pools all samples
            scores = {id: outcome[id] for id in ids if id in outcome}
            for name, world in prepared.other_worlds().items():
                scores |= score_new_classes(name, world, self.record, training.name)
            done[training.name] = (training, scores)
        return prepared.settings.rules().table(prepared.partition.domains, done, prepared.generalises)

    @property
    def _errors(self) -> list[Exception]:
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, Exception)]

    @property
    def outcome(self) -> Record | Exception:
        return self._errors[0] if self._errors else self.record


def resume(folder: str | Path, progress: Progress | None = None) -> Record:
    """Continue a run that was stopped or killed; a finished run is only read."""
    path = Path(folder)
    if not (path / "manifest.json").exists() and (runs := sorted(path.glob("*/manifest.json"))):
        names = join_names([str(manifest.parent) for manifest in runs])
        raise SettingsError(f"{path} is an experiment; repeat the command that began it, or resume one of {names}")
    manifest = read_manifest(path)
    if manifest["memory"] and Record(path).result() is None:
        raise SettingsError(f"{path} took its samples from memory; call fedvlm.run again with out={str(path)!r}")
    return execute(build(manifest["identity"]), path, progress=progress)


def grow(run: str | Path, data: str, out: str | Path, progress: Progress) -> Record:
    """Run again on data with new classes, new or removed images, if every change hides among samples of its class.

    The difference of two sums that differ by one image is the embedding of that image.
    """
    manifest = read_manifest(Path(run))
    settings = build(manifest["identity"])
    if manifest["memory"] or settings.clients.partition not in ("own", "domain"):
        raise SettingsError(f"{run} cannot grow: its samples must be in files, and its clients named by the data")
    is_store = settings.encoder.startswith("store:")
    grown = replace(settings, encoder=data) if is_store else replace(settings, data=data)
    before, now = (load(version, progress)[0] for version in (settings, grown))
    if before.fingerprint != manifest["rows"]:
        raise DataError(f"the data of {run} are not as they were; keep them, and name a new folder with all images")
    samples = [_samples_by_label(version, table) for version, table in ((settings, before), (grown, now))]
    smallest = setting(settings.method, "min_class_samples") or MIN_CLASS_SAMPLES
    has_noise = settings.channel.noise_multiplier or setting(settings.method, "noise_multiplier")
    known = {client for client, _ in samples[0]}  # a new client has no sum to be compared with
    for client, name in () if has_noise or settings.allow_small else sorted({*samples[0], *samples[1]}):
        changed = len(samples[0].get((client, name), set()) ^ samples[1].get((client, name), set()))
        if 0 < changed < smallest and client in known:
            problem = f"{changed} samples of {name} at {client} have changed, and two sums would show them"
            raise DataError(f"{problem}; wait until {smallest} have changed, or set channel.noise_multiplier")
    content = [set().union(*of.values()) for of in samples]
    new_classes = [name for name in now.classes if name not in before.classes]
    facts = {"added": len(content[1] - content[0]), "removed": len(content[0] - content[1]), "new_classes": new_classes}
    version = {"from": Path(run).name, "rows": now.fingerprint, **facts}
    return execute(grown, out, progress=progress, history=[*manifest.get("history", ()), version])


def _samples_by_label(settings: Settings, table: EmbeddedTable) -> dict[tuple[str, str], set[str]]:
    """Return the digests of each client's samples of a class, or with and without a finding."""
    clients, labels = prepare(settings, table, settings.seeds[0]).partition.clients, label_tensor(table).tolist()
    out: dict[tuple[str, str], set[str]] = {}
    for id, client in clients.items():
        for row in np.concatenate(member_rows(client)).tolist():
            for name in label_keys(labels[row], table.classes):
                out.setdefault((id, name), set()).add(table.content[row])
    return out


def default_name(settings: Settings, embedded: EmbeddedTable | None) -> str:
    """Return the folder name that the same settings always get, so that a finished run is found again."""
    key = dumps([settings.identity(), embedded.fingerprint if embedded else ""], sort_keys=True)
    name = data_name(settings.data, settings.encoder) if embedded is None else slug(embedded.name)
    return f"{settings.method.name}-{name}-{sha256(key.encode()).hexdigest()[:8]}"
