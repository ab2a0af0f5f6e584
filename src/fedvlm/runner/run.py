"""Runs: settings -> federation -> engine -> evaluate -> record, one of them or many together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from fedvlm.data.table import EmbeddedTable
from fedvlm.errors import SettingsError, join_names
from fedvlm.evaluate import metrics
from fedvlm.evaluate.protocols import Training
from fedvlm.record import Record, read_manifest
from fedvlm.runner import cluster, halves, schedule, tune
from fedvlm.runner.begin import RunContext, begin_run
from fedvlm.runner.forecast import training_time
from fedvlm.runner.load import Loader, Progress
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.schedule import Job, JobSpec, ProgressTotal, must_run_alone
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.train import train
from fedvlm.runner.training import file_name, finished_scores
from fedvlm.storage.files import data_name, slug

MAX_OPEN_RUNS = 64  # runs that are begun together: each holds the lock of its record


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
                schedule.run_jobs(jobs)
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
                training_scores |= halves.score_new_classes(prepared.new_world(), self.record, training.name)
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
        context.log(f"already finished, read from {record.folder}; --again runs it")
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
