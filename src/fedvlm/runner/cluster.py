"""Run trainings on a Dask cluster, with the same record as on one machine.

A worker reads the samples from disk if it sees the same files; otherwise they are sent once to each worker. A
training's files and lines come back over the network, so workers need no shared disk. If a worker is lost, another
one continues from the checkpoint if both see the run's folder, or from where the training was when it was sent.
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
from typing import Any, NamedTuple
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
from fedvlm.plugins import require
from fedvlm.record import CLUSTER_FOLDER, Record, read_manifest
from fedvlm.runner.jobs import Job, JobSpec, run_inline, with_job_name
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import Settings
from fedvlm.runner.training import file_name, train
from fedvlm.storage.files import slug, write_file, write_json

LOCALHOST = "127.0.0.1"
ADDRESS_FORMS = "dask (on this machine), dask://HOST:PORT, or tcp://127.0.0.1:PORT without TLS"
STORE_PREFIX = "store:"
MAX_OPEN_TABLES = 2  # tables of embeddings that a worker keeps in memory


@dataclass(frozen=True)
class SampleLocation:
    """Where the embeddings of a run are on disk, and their digest."""

    path: Path  # a store, or the cache
    encoder: str  # beginning of the encoder's fingerprint in the cache; empty for a store
    precision: Precision
    patches: bool
    digest: str


class WorkerTraining(NamedTuple):
    """Which training a worker runs."""

    settings: Settings
    seed: int
    name: str


TrainingFiles = tuple[list[dict[str, Any]], dict[str, bytes]]  # lines of the record, and files by name


class SamplesNotVisible(Exception):
    """A worker does not see the samples where they are expected."""


def run_jobs(jobs: Sequence[Job], address: str) -> None:
    """Run all jobs, the longest first; a failed one is reported and the others go on."""
    several = len(jobs) > 1
    # Finished jobs are only read. Images that are decoded on demand stay here, with the jobs that train on them.
    remote_jobs: list[Job] = []
    local_jobs: list[Job] = []
    for job in jobs:
        is_remote = job.cost and job.spec is not None and job.spec.rows.images is None
        (remote_jobs if is_remote else local_jobs).append(job)
    if not remote_jobs:
        for job in local_jobs:
            run_inline(job, several)
        return
    with _client(address) as client, catch_warnings():
        from distributed import as_completed

        filterwarnings("ignore", message="Sending large graph")
        offers: dict[int, _SampleOffer] = {}
        for job in remote_jobs:
            assert job.spec is not None
            if id(job.spec.rows) not in offers:
                offers[id(job.spec.rows)] = _SampleOffer(client, job, job.spec)
        job_of_future = {_submit(client, job, offers): job for job in remote_jobs}
        for job in local_jobs:
            run_inline(job, several)
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


class _SampleOffer:
    """The samples of some trainings: where workers find them, or the samples themselves, sent once."""

    def __init__(self, client: Any, job: Job, spec: JobSpec) -> None:
        self.client, self.rows = client, spec.rows
        self.metadata, location = strip_samples(spec.settings, spec.rows)
        in_files = not job.record.manifest["memory"]
        is_visible = in_files and all(client.run(path_exists, location).values())
        self.place = location if is_visible else None

    @cached_property
    def metadata_future(self) -> Any:
        return self.client.submit(_identity, self.metadata, pure=False)

    @cached_property
    def samples_future(self) -> Any:
        # As the result of a task: those of a lost worker are computed again, unlike scattered ones.
        return self.client.submit(_identity, self.rows, pure=False)


def _submit(client: Any, job: Job, offers: Mapping[int, _SampleOffer]) -> Any:
    spec = job.spec
    assert spec is not None
    offer = offers[id(spec.rows)]
    rows = offer.samples_future if offer.place is None else offer.metadata_future
    training = WorkerTraining(spec.settings, spec.seed, spec.training)
    record = (job.record.folder.absolute(), job.record.manifest, _saved_progress(job))
    return client.submit(run_on_worker, training, rows, offer.place, *record, pure=False, priority=job.cost)


def _identity(rows: EmbeddedTable) -> EmbeddedTable:
    return rows


def _saved_progress(job: Job) -> TrainingFiles:
    """Return the lines and the checkpoint of a stopped training."""
    assert job.spec is not None
    name = f"{job.spec.seed}-{slug(job.spec.training)}"
    folder = job.record.folder / "trainings"
    file = folder / f"{name}.checkpoint"
    if not file.exists() or (folder / f"{name}.local").exists():  # local tensors on disk are too large to send
        return [], {}
    lines = [line for line in job.record.lines() if line["training"] == name]
    return lines, {file.name: file.read_bytes()}


def run_on_worker(
    training: WorkerTraining,
    rows: EmbeddedTable,
    place: SampleLocation | None,
    run: Path,  # the folder of the run, where the command was called
    manifest: Mapping[str, Any],
    progress: TrainingFiles,
) -> tuple[list[dict[str, Any]], dict[str, bytes], Any]:
    """Run a training on a worker; return its lines, files and scores."""
    if place is not None:
        loaded = load_samples(rows, place)
        if loaded is None:
            raise SamplesNotVisible
        rows = loaded
    prepared = prepare(replace(training.settings, workers=1), rows, training.seed)
    (planned,) = (candidate for candidate in prepared.trainings if candidate.name == training.name)
    name = file_name(planned, training.seed)
    with _worker_record(run, name, manifest) as record, one_thread():
        folder = record.folder / "trainings"
        if not (folder / f"{name}.checkpoint").exists():
            for line in progress[0]:
                record.add_line(line)
            for file, data in progress[1].items():
                write_file(folder / file, data)
        scores = train(prepared, planned, record, lambda rounds: None)
        return record.lines(), {path.name: path.read_bytes() for path in folder.glob(f"{name}.*")}, scores


@contextmanager
def _worker_record(run: Path, name: str, manifest: Mapping[str, Any]) -> Iterator[Record]:
    """Open a record for one training: in the run's folder if this worker sees it, so that it outlives the worker.

    Otherwise, or if another worker still holds it, the record is in a temporary folder.
    """
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


def _store_result(job: Job, lines: Sequence[Mapping[str, Any]], files: Mapping[str, bytes], outcome: Any) -> Any:
    """Write what came back; the scores go last, because they mark a training as finished."""
    assert job.spec is not None
    name = f"{job.spec.seed}-{slug(job.spec.training)}"
    folder = job.record.folder / "trainings"
    try:
        have = [line for line in job.record.lines() if line["training"] == name]
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(have, lines, strict=False))))
        job.record.drop_lines_after(name, same)  # lines that were there are not reported twice
        for line in lines[same:]:
            job.record.add_line(line)
        for file in sorted(files, key=lambda file: file == f"{name}.json"):
            write_file(folder / file, files[file])
        for end in ("checkpoint", "local"):  # of an earlier attempt on this machine
            (folder / f"{name}.{end}").unlink(missing_ok=True)
        rmtree(job.record.folder / CLUSTER_FOLDER / name, ignore_errors=True)
        with suppress(OSError):  # other trainings are still there, or it never existed
            (job.record.folder / CLUSTER_FOLDER).rmdir()
    except FedVLMError as error:
        return error
    return outcome


@contextmanager
def _client(on: str) -> Iterator[Any]:
    """Connect to the scheduler; Dask runs pickled code, so this takes TLS or this machine only."""
    dask = require("distributed", f"--on {on} needs Dask", "cluster")
    if on == "dask":
        security = dask.Security.temporary()
        options = {"n_workers": count_cores(), "threads_per_worker": 1, "dashboard_address": None}
        with (
            dask.LocalCluster(host=LOCALHOST, protocol="tls", security=security, **options) as cluster,
            dask.Client(cluster, security=security) as client,
        ):
            yield client
        return
    address, security = parse_address(on), None
    if address.startswith("tls:"):
        security = dask.Security(require_encryption=True)  # with the files that Dask's own settings name
        if not security.get_connection_args("client").get("ssl_context"):
            names = "(ca-file, client.cert, client.key), as DASK_DISTRIBUTED__COMM__TLS__CA_FILE"
            remedy = f"set distributed.comm.tls in Dask's settings {names}"
            raise SettingsError(f"--on {on}: no certificate is named; {remedy}")
    try:
        client = dask.Client(address, security=security, timeout="20s")
    except OSError as error:
        raise FederationError(f"no scheduler of Dask answers at {address}: {error}") from error
    with client:
        yield client


def parse_address(on: str) -> str:
    """Return the scheduler's address from `--on`, or `dask` for a cluster on this machine."""
    if on == "dask":
        return on
    place = urlsplit(on)
    if place.scheme in ("dask", "tls") and place.netloc:
        return f"tls://{place.netloc}"
    if place.scheme == "tcp" and place.hostname in (LOCALHOST, "localhost"):
        return on
    raise SettingsError(f"--on must be {ADDRESS_FORMS}; got {on!r}")


_open_tables: dict[str, EmbeddedTable] = {}


def strip_samples(settings: Settings, rows: EmbeddedTable) -> tuple[EmbeddedTable, SampleLocation]:
    """Return a table without its embeddings, and where these are on disk."""
    path, encoder = cache_directory(), rows.encoder.rpartition("@")[2]
    if settings.encoder.startswith(STORE_PREFIX):
        path, encoder = Path(settings.encoder.removeprefix(STORE_PREFIX)).expanduser(), ""
    place = SampleLocation(path.absolute(), encoder, settings.precision, rows.patches is not None, digest(rows.x))
    return replace(rows, x=rows.x[:0], patches=None), place


def path_exists(place: SampleLocation) -> bool:
    return place.path.exists()


def load_samples(bare: EmbeddedTable, place: SampleLocation) -> EmbeddedTable | None:
    """Return the table with its embeddings from disk; None if they are missing or differ."""
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
