"""Runs: settings -> federation -> engine -> evaluate -> record, one of them or many together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from fedvlm.data.table import Embedded
from fedvlm.errors import SettingsError, listing
from fedvlm.evaluate import scores
from fedvlm.evaluate.protocols import Training
from fedvlm.record import Record, read_manifest
from fedvlm.runner import cluster, halves, schedule, tune
from fedvlm.runner.begin import Need, begin
from fedvlm.runner.forecast import training_time
from fedvlm.runner.load import Loader, Progress
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.schedule import Order, Piece, Tally, stays
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.train import train
from fedvlm.runner.training import file_name, finished
from fedvlm.storage.files import data_name, slug

MOST = 64  # runs that are begun together: each holds the lock of its record


def execute(
    settings: Settings,
    out: str | Path | None = None,
    again: bool = False,
    embedded: Embedded | None = None,
    progress: Progress | None = None,
    listen: Callable[[str, Any], None] | None = None,
    say: Callable[[str], None] = lambda note: None,  # is told what to know before it begins
) -> Record:
    folder = Path(out) if out else Path("runs") / default_name(settings, embedded)
    (found,) = together([(settings, folder)], again, embedded, progress, listen, say)
    if isinstance(found, Exception):
        raise found
    return found


def together(
    asked: Sequence[tuple[Settings, Path]],  # of each run, and its folder
    again: bool = False,
    embedded: Embedded | None = None,
    progress: Progress | None = None,
    listen: Callable[[str, Any], None] | None = None,
    say: Callable[[str], None] = lambda note: None,
    enduring: bool = False,
    on: str = "",  # a cluster: dask, dask://HOST:PORT
) -> list[Record | Exception]:
    """The trainings of all runs in one schedule; for each run its record, or what hindered it.

    One that cannot begin is raised at once, unless the others are to endure it.
    """
    report = progress or (lambda what, done, total: None)
    each = {folder: settings for settings, folder in asked}  # one may be asked for twice
    out: dict[Path, Record | Exception] = {}
    load = Loader()
    for first in range(0, len(each), MOST):
        tally = Tally(report)
        runs: dict[Path, _Run | Record | Exception] = {}
        with ExitStack() as locks:
            for folder, settings in list(each.items())[first : first + MOST]:
                record = Record(folder, listen)
                own = locks.enter_context(ExitStack())
                try:
                    need = Need(record, again, embedded, load, report, say)
                    run = _open(settings, need, own)
                    runs[folder] = run
                except Exception as error:  # of any kind: the others are no worse for it
                    own.close()
                    if not enduring:
                        raise
                    runs[folder] = error
            open_ = [one for one in runs.values() if isinstance(one, _Run)]
            pieces = [piece for one in open_ for piece in one.pieces(tally)]
            if on:
                cluster.carry(pieces, on)
            else:
                schedule.carry(pieces)
        for folder, one in runs.items():
            out[folder] = one.outcome if isinstance(one, _Run) else one
    return [out[folder] for _, folder in asked]


@dataclass
class _Run:
    """A run that has begun, until its last training is done."""

    record: Record
    seeds: Sequence[Prepared]
    lock: ExitStack
    found: dict[tuple[int, str], scores.Results | Exception] = field(default_factory=dict)

    def pieces(self, tally: Tally) -> Iterator[Piece]:
        settings = self.seeds[0].settings
        rounds = max(1, settings.method.rounds)
        for prepared in self.seeds:
            for training in prepared.trainings:
                yield self._piece(prepared, training, tally.place(settings.method.name, rounds))

    def _piece(self, prepared: Prepared, training: Training, tell: Callable[[int], None]) -> Piece:
        settings, name = prepared.settings, file_name(training, prepared.seed)
        there = finished(self.record, name) is not None

        def work(record: Record, workers: int, tell: Callable[[int], None]) -> scores.Results:
            here = replace(prepared, settings=replace(settings, workers=workers))
            return train(here, training, record, tell)

        def done(found: scores.Results | Exception) -> None:
            self.found[prepared.seed, training.name] = found
            tell(max(1, settings.method.rounds))
            if len(self.found) == sum(len(one.trainings) for one in self.seeds):
                self._finish()

        return Piece(
            name=f"{settings.method.name}, training {name}",
            record=self.record,
            cost=0.0 if there else training_time(prepared, training),
            workers=settings.workers,
            alone=stays(settings) or there,
            work=work,
            tell=tell,
            done=done,
            order=Order(settings, prepared.given, prepared.seed, training.name),
        )

    def _finish(self) -> None:
        if not self._failed:
            each = [(one, training) for one in self.seeds for training in one.trainings]
            self.record.sort_lines([file_name(training, one.seed) for one, training in each])
            self.record.finish([self._table(one) for one in self.seeds])
        self.lock.close()

    def _table(self, prepared: Prepared) -> scores.Table:
        """The numbers that the trainings of one seed add up to."""
        done = {}
        for training in prepared.trainings:
            found = self.found[prepared.seed, training.name]
            assert not isinstance(found, Exception)
            clients = (*training.train, *training.unseen)  # and not one that has everyone's rows
            mine = {id: found[id] for id in clients if id in found}
            if prepared.new is not None:
                mine |= halves.scored(prepared.new_world(), self.record, training.name)
            done[training.name] = (training, mine)
        rules, domains = prepared.settings.rules(), prepared.division.domains
        return rules.table(domains, done, prepared.generalises)

    @property
    def _failed(self) -> list[Exception]:
        return [one for one in self.found.values() if isinstance(one, Exception)]

    @property
    def outcome(self) -> Record | Exception:
        return self._failed[0] if self._failed else self.record


def _open(settings: Settings, need: Need, lock: ExitStack) -> _Run | Record:
    """A run that has begun, or the record of one that is finished."""
    record, embedded = need.record, need.embedded
    if embedded is not None and (settings.descriptions or settings.texts):
        raise SettingsError("rows in memory have their own descriptions and texts; set them there")
    if settings.tune:
        tune.check(settings)
    lock.enter_context(record.lock())
    if settings.tune and (record.folder / "manifest.json").exists():
        settings = tune.known(settings, record.manifest)
    if record.result() is not None and not need.again:
        found: dict[str, Any] = {"identity": settings.identity()}
        if embedded is not None:
            found |= {"encoder": embedded.encoder, "rows": embedded.fingerprint}
        record.compare(found)
        lock.close()
        need.say(f"already finished, read from {record.folder}; --again runs it")
        return record
    seeds = begin(settings, need)
    cluster.collect(record)
    return _Run(record, seeds, lock)


def resume(folder: str | Path, progress: Progress | None = None) -> Record:
    """Goes on where a run was stopped, however it was stopped; a finished run is just read."""
    path = Path(folder)
    if not (path / "manifest.json").exists() and (
        runs := sorted(str(one.parent) for one in path.glob("*/manifest.json"))
    ):
        raise SettingsError(
            f"{path} is an experiment; the command that began it goes on with all of it, and "
            f"resume with one of {listing(runs)}"
        )
    manifest = read_manifest(path)
    if manifest["memory"] and Record(path).result() is None:
        raise SettingsError(f"{path} took its rows from memory; call fedvlm.run again with out= it")
    return execute(build(manifest["identity"]), path, progress=progress)


def default_name(settings: Settings, embedded: Embedded | None) -> str:
    """The same settings always get the same directory, so a finished run is found again."""
    key = dumps([settings.identity(), embedded.fingerprint if embedded else ""], sort_keys=True)
    name = data_name(settings.data, settings.encoder) if embedded is None else slug(embedded.name)
    return f"{settings.method.name}-{name}-{sha256(key.encode()).hexdigest()[:8]}"
