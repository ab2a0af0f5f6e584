"""Trainings on a cluster of Dask: the same record as on one machine.

A training is told by the settings of its run. A worker that sees the files its rows are from reads
them there; else the rows are sent, once to each worker. What a training leaves comes back as files
and lines, and is written here: workers need no common disk. A training of a worker that is lost
is given to another: it goes on from its checkpoint if both see the run's folder, else from where it
was when it was sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit
from warnings import catch_warnings, filterwarnings

from torch import Tensor

from fedvlm.data.table import EmbeddedTable
from fedvlm.encoders.cache import cache_directory
from fedvlm.encoders.cache.embed import Precision, read_cached
from fedvlm.encoders.store import open_store
from fedvlm.engines.sequential import one_thread
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError
from fedvlm.machine import count_cores
from fedvlm.record import CLUSTER_FOLDER, Record, read_manifest
from fedvlm.runner.jobs import Job, JobSpec, run_inline, with_job_name
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import Settings
from fedvlm.runner.training import file_name, train
from fedvlm.storage.files import is_locked, slug, write_file, write_json

LOCALHOST = "127.0.0.1"
ADDRESS_FORMS = "dask (on this machine), dask://HOST:PORT, or tcp://127.0.0.1:PORT without TLS"


@dataclass(frozen=True)
class SampleLocation:
    """Where the rows of a run lie, and what they are."""

    path: Path  # a store, or the cache of embeddings
    encoder: str  # the fingerprint's beginning, of rows in a cache; else empty
    precision: Precision
    patches: bool
    digest: str


def run_jobs(jobs: Sequence[Job], on: str) -> None:
    """All of them, the longest first; one that fails is told as such, and the others go on."""
    several = len(jobs) > 1
    remote_jobs = [job for job in jobs if job.cost and _portable(job)]
    for job in jobs:
        if not job.cost:  # it is done already
            run_inline(job, several)
    staying = [job for job in jobs if job.cost and not _portable(job)]
    if not remote_jobs:
        _run_locally(staying, several)
        return
    with _client(on) as client, catch_warnings():
        from distributed import as_completed

        filterwarnings("ignore", message="Sending large graph")

        offers: dict[int, _SampleOffer] = {}
        for job in remote_jobs:
            assert job.spec is not None
            if id(job.spec.rows) not in offers:
                offers[id(job.spec.rows)] = _SampleOffer(client, job, job.spec)
        job_of_future = {_submit(client, job, offers): job for job in remote_jobs}
        _run_locally(staying, several)
        done = as_completed(list(job_of_future))
        for future in done:
            job = job_of_future[future]
            outcome: Any = future.exception()
            if isinstance(outcome, SamplesNotVisible):
                assert job.spec is not None
                offers[id(job.spec.rows)].place = None
                again = _submit(client, job, offers)
                job_of_future[again] = job
                done.add(again)
                continue
            if outcome is None:
                outcome = _store_result(job, *future.result())
            elif not isinstance(outcome, FedVLMError):
                outcome = FederationError(f"on the cluster: {type(outcome).__name__}: {outcome}")
            failed = isinstance(outcome, FedVLMError) and several
            job.on_done(with_job_name(job, outcome) if failed else outcome)


def _portable(job: Job) -> bool:
    """Images that are decoded on demand stay where they are, and so does who trains on them."""
    return job.spec is not None and job.spec.rows.images is None


def _run_locally(jobs: Sequence[Job], several: bool) -> None:
    for job in jobs:
        run_inline(job, several)


class SamplesNotVisible(Exception):
    """A worker does not see the rows where they were said to be."""


class _SampleOffer:
    """The rows of some trainings: where workers find them, or they themselves, sent once."""

    def __init__(self, client: Any, job: Job, order: JobSpec) -> None:
        self.client, self.rows = client, order.rows
        self.metadata, location = strip_samples(order.settings, order.rows)
        in_files = not job.record.manifest["memory"]
        is_visible = in_files and all(client.run(path_exists, location).values())
        self.place = location if is_visible else None

    @cached_property
    def metadata_future(self) -> Any:
        return self.client.submit(_identity, self.metadata, pure=False)

    @cached_property
    def samples_future(self) -> Any:
        # rows as the result of a task: those of a lost worker are made again, unlike scattered ones
        return self.client.submit(_identity, self.rows, pure=False)


def _submit(client: Any, job: Job, offers: Mapping[int, _SampleOffer]) -> Any:
    order = job.spec
    assert order is not None
    offer = offers[id(order.rows)]
    rows = offer.samples_future if offer.place is None else offer.metadata_future
    job_args = (order.settings, rows, offer.place, order.seed, order.training)
    record = (job.record.folder.absolute(), job.record.manifest, _saved_progress(job))
    return client.submit(run_on_worker, *job_args, *record, pure=False, priority=job.cost)


def _identity(rows: EmbeddedTable) -> EmbeddedTable:
    return rows


TrainingFiles = tuple[list[dict[str, Any]], dict[str, bytes]]  # lines and files of a training


def _saved_progress(job: Job) -> TrainingFiles:
    """What there is of a training that was stopped: its lines, and its checkpoint."""
    assert job.spec is not None
    name = f"{job.spec.seed}-{slug(job.spec.training)}"
    folder = job.record.folder / "trainings"
    file = folder / f"{name}.checkpoint"
    if not file.exists() or (folder / f"{name}.local").exists():  # too much to be sent
        return [], {}
    lines = [line for line in job.record.lines() if line["training"] == name]
    return lines, {file.name: file.read_bytes()}


def run_on_worker(
    settings: Settings,
    rows: EmbeddedTable,
    place: SampleLocation | None,
    seed: int,
    name: str,
    run: Path,  # its folder, where the command is
    manifest: Mapping[str, Any],
    progress: TrainingFiles,
) -> tuple[list[dict[str, Any]], dict[str, bytes], Any]:
    """What a worker does: a training in a folder of its own, given back as lines and files."""
    if place is not None:
        loaded = load_samples(rows, place)
        if loaded is None:
            raise SamplesNotVisible
        rows = loaded
    prepared = prepare(replace(settings, workers=1), rows, seed)
    (training,) = (candidate for candidate in prepared.trainings if candidate.name == name)
    name_on_disk = file_name(training, seed)
    with _worker_record(run, name_on_disk, manifest) as record, one_thread():
        folder = record.folder / "trainings"
        if not (folder / f"{name_on_disk}.checkpoint").exists():
            for line in progress[0]:
                record.add_line(line)
            for file, data in progress[1].items():
                write_file(folder / file, data)
        scores = train(prepared, training, record, lambda rounds: None)
        paths = folder.glob(f"{name_on_disk}.*")
        return record.lines(), {path.name: path.read_bytes() for path in paths}, scores


@contextmanager
def _worker_record(run: Path, name: str, manifest: Mapping[str, Any]) -> Iterator[Record]:
    """A record for one training: in the run's folder if it is seen from here, so that it outlives
    this worker; else, or if another worker is at it still, in a folder that goes with it."""
    with ExitStack() as stack:
        try:
            if read_manifest(run) != manifest:
                raise DataError("another run")
            record = Record(run / CLUSTER_FOLDER / name)
            stack.enter_context(record.lock())
        except (FedVLMError, OSError):
            record = Record(Path(stack.enter_context(TemporaryDirectory(prefix="fedvlm-"))))
        write_json(record.folder / "manifest.json", manifest)
        yield record


def collect_lost_trainings(record: Record) -> None:
    """Takes into a record what lost trainings of an earlier cluster have left in its folder."""
    for folder in sorted((record.folder / CLUSTER_FOLDER).glob("*")):
        if is_locked(folder / ".lock"):  # a worker that nobody waits for any more
            continue
        worker_folder, trainings = folder / "trainings", record.folder / "trainings"
        checkpoint = f"{folder.name}.checkpoint"
        if (worker_folder / checkpoint).exists() and not (trainings / f"{folder.name}.json").exists():
            record.drop_lines_after(folder.name, 0)
            for line in Record(folder).lines():
                record.add_line(line)
            trainings.mkdir(exist_ok=True)
            for file in (worker_folder / f"{folder.name}.local", worker_folder / checkpoint):
                if file.exists():
                    file.replace(trainings / file.name)
        rmtree(folder, ignore_errors=True)


def _store_result(job: Job, lines: Sequence[Mapping[str, Any]], files: Mapping[str, bytes], outcome: Any) -> Any:
    """Writes what came back; the outcome goes last, for it says that a training is done."""
    assert job.spec is not None
    name = f"{job.spec.seed}-{slug(job.spec.training)}"
    folder = job.record.folder / "trainings"
    try:
        have = [line for line in job.record.lines() if line["training"] == name]
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(have, lines, strict=False))))
        job.record.drop_lines_after(name, same)  # and tells nobody twice of what was there before
        for line in lines[same:]:
            job.record.add_line(line)
        for file in sorted(files, key=lambda path_name: path_name == f"{name}.json"):
            write_file(folder / file, files[file])
        for end in ("checkpoint", "local"):  # of an earlier run, on one machine
            (folder / f"{name}.{end}").unlink(missing_ok=True)
        rmtree(job.record.folder / CLUSTER_FOLDER / name, ignore_errors=True)
        with suppress(OSError):  # others are there still, or it never was
            (job.record.folder / CLUSTER_FOLDER).rmdir()
    except FedVLMError as error:
        return error
    return outcome


@contextmanager
def _client(on: str) -> Iterator[Any]:
    """A connection to the scheduler; it runs pickled code, so it is TLS or this machine alone."""
    try:
        from distributed import Client, LocalCluster, Security
    except ImportError as error:
        raise SettingsError(f"--on {on} needs Dask; install it by pip install 'fedvlm[cluster]'") from error
    if on == "dask":
        security = Security.temporary()
        options = {"n_workers": count_cores(), "threads_per_worker": 1, "dashboard_address": None}
        with (
            LocalCluster(host=LOCALHOST, protocol="tls", security=security, **options) as cluster,
            Client(cluster, security=security) as client,
        ):
            yield client
        return
    address, security = _address(on), None
    if address.startswith("tls:"):
        security = Security(require_encryption=True)  # files as Dask's own settings name them
        if not security.get_connection_args("client").get("ssl_context"):
            raise SettingsError(
                f"--on {on}: no certificate is named; set distributed.comm.tls in Dask's settings "
                "(ca-file, client.cert, client.key), as DASK_DISTRIBUTED__COMM__TLS__CA_FILE"
            )
    try:
        client = Client(address, security=security, timeout="20s")
    except OSError as error:
        raise FederationError(f"no scheduler of Dask answers at {address}: {error}") from error
    with client:
        yield client


def _address(on: str) -> str:
    place = urlsplit(on)
    if place.scheme in ("dask", "tls") and place.netloc:
        return f"tls://{place.netloc}"
    if place.scheme == "tcp" and place.hostname in (LOCALHOST, "localhost"):
        return on
    raise SettingsError(f"--on {on!r}: name {ADDRESS_FORMS}")


STORE_PREFIX = "store:"
MAX_OPEN_TABLES = 2  # tables of rows that a worker keeps open


_open_tables: dict[str, EmbeddedTable] = {}


def strip_samples(settings: Settings, rows: EmbeddedTable) -> tuple[EmbeddedTable, SampleLocation]:
    """The rows without what lies in a file, and where that is."""
    of_store = settings.encoder.startswith(STORE_PREFIX)
    place = SampleLocation(
        Path(settings.encoder.removeprefix(STORE_PREFIX)).expanduser().absolute()
        if of_store
        else cache_directory().absolute(),
        "" if of_store else rows.encoder.rpartition("@")[2],
        settings.precision,
        rows.patches is not None,
        digest(rows.x),
    )
    return replace(rows, x=rows.x[:0], patches=None), place


def path_exists(place: SampleLocation) -> bool:
    """Whether there is a file or folder of that name on this machine."""
    return place.path.exists()


def load_samples(bare: EmbeddedTable, place: SampleLocation) -> EmbeddedTable | None:
    """The rows with what lies there; None if it is not there, or not the same."""
    if place.digest not in _open_tables:
        try:
            x, patches = _read(bare, place)
        except (FedVLMError, OSError, KeyError):
            return None
        if digest(x) != place.digest:
            return None
        for old in list(_open_tables)[: 1 - MAX_OPEN_TABLES]:
            del _open_tables[old]
        _open_tables[place.digest] = replace(bare, x=x, patches=patches)
    held = _open_tables[place.digest]
    return replace(bare, x=held.x, patches=held.patches)


def _read(bare: EmbeddedTable, place: SampleLocation) -> tuple[Tensor, Any]:
    if place.encoder:
        content = [bytes.fromhex(content_digest) for content_digest in bare.content]
        return read_cached(place.path, place.encoder, place.precision, place.patches, content)
    stored = open_store(place.path)
    number = {content_digest: row for row, content_digest in enumerate(stored.content)}
    rows = [number[content_digest] for content_digest in bare.content]
    x = stored.x if rows == list(range(len(stored.x))) else stored.x[rows]
    return x, None if stored.patches is None or not place.patches else stored.patches[rows]


def digest(x: Tensor) -> str:
    return sha256(x.contiguous().numpy().data).hexdigest()
