"""Trainings on a cluster of Dask: the same record as on one machine.

A training is told by the settings of its run; the rows are sent once to each worker that has none
yet. What it leaves comes back as files and lines, and is written here: workers need no common disk.
A worker that is lost costs its training, which Dask gives to another one from the beginning.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit
from warnings import catch_warnings, filterwarnings

from fedvlm.data.table import Embedded
from fedvlm.engines.single import one_thread
from fedvlm.errors import FederationError, FedVLMError, SettingsError
from fedvlm.machine import cores
from fedvlm.record import Record
from fedvlm.runner.prepare import prepare
from fedvlm.runner.schedule import Piece, here, named
from fedvlm.runner.settings import Settings
from fedvlm.runner.train import train
from fedvlm.runner.training import file_name
from fedvlm.storage.files import slug, write
from fedvlm.storage.sealed import write_json

LOCAL = "127.0.0.1"
FORMS = "dask (on this machine), dask://HOST:PORT, or tcp://127.0.0.1:PORT without TLS"


def carry(pieces: Sequence[Piece], on: str) -> None:
    """All of them, the longest first; one that fails is told as such, and the others go on."""
    several = len(pieces) > 1
    away = [piece for piece in pieces if piece.cost]
    for piece in pieces:
        if not piece.cost:  # it is done already
            here(piece, several)
    if not away:
        return
    with _client(on) as client, catch_warnings():
        from distributed import as_completed

        # rows as the result of a task: those of a lost worker are made again, unlike scattered ones
        filterwarnings("ignore", message="Sending large graph")

        sent: dict[int, Any] = {}
        asked = {}
        for piece in away:
            order = piece.order
            assert order is not None
            if id(order.rows) not in sent:
                sent[id(order.rows)] = client.submit(_same, order.rows, pure=False)
            what = (order.settings, sent[id(order.rows)], order.seed, order.training)
            future = client.submit(
                there, *what, piece.record.manifest, pure=False, priority=piece.cost
            )
            asked[future] = piece
        for future in as_completed(list(asked)):
            piece = asked[future]
            found: Any = future.exception()
            if found is None:
                found = _take(piece, *future.result())
            elif not isinstance(found, FedVLMError):
                found = FederationError(f"on the cluster: {type(found).__name__}: {found}")
            failed = isinstance(found, FedVLMError) and several
            piece.done(named(piece, found) if failed else found)


def _same(rows: Embedded) -> Embedded:
    return rows


def there(
    settings: Settings, rows: Embedded, seed: int, name: str, manifest: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, bytes], Any]:
    """What a worker does: a training in a folder of its own, given back as lines and files."""
    prepared = prepare(replace(settings, workers=1), rows, seed)
    (training,) = (one for one in prepared.trainings if one.name == name)
    with TemporaryDirectory(prefix="fedvlm-") as folder, one_thread():
        record = Record(Path(folder))
        write_json(record.folder / "manifest.json", manifest)
        found = train(prepared, training, record, lambda rounds: None)
        left = (record.folder / "trainings").glob(f"{file_name(training, seed)}.*")
        return record.lines(), {path.name: path.read_bytes() for path in left}, found


def _take(
    piece: Piece, lines: Sequence[Mapping[str, Any]], files: Mapping[str, bytes], found: Any
) -> Any:
    """Writes what came back; the outcome goes last, for it says that a training is done."""
    assert piece.order is not None
    name = f"{piece.order.seed}-{slug(piece.order.training)}"
    folder = piece.record.folder / "trainings"
    try:
        piece.record.keep_lines(name, min((line["round"] for line in lines), default=0))
        for line in lines:
            piece.record.add_line(line)
        for file in sorted(files, key=lambda one: one == f"{name}.json"):
            write(folder / file, files[file])
        (folder / f"{name}.checkpoint").unlink(missing_ok=True)  # of an earlier run, on one machine
    except FedVLMError as error:
        return error
    return found


@contextmanager
def _client(on: str) -> Iterator[Any]:
    """A connection to the scheduler; it runs pickled code, so it is TLS or this machine alone."""
    try:
        from distributed import Client, LocalCluster, Security
    except ImportError as error:
        raise SettingsError(
            f"--on {on} needs Dask; install it by pip install 'fedvlm[cluster]'"
        ) from error
    if on == "dask":
        security = Security.temporary()
        options = {"n_workers": cores(), "threads_per_worker": 1, "dashboard_address": None}
        with (
            LocalCluster(host=LOCAL, protocol="tls", security=security, **options) as cluster,
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
    if place.scheme == "tcp" and place.hostname in (LOCAL, "localhost"):
        return on
    raise SettingsError(f"--on {on!r}: name {FORMS}")
