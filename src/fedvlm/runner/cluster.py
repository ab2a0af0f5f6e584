"""Trainings on a cluster of Dask: the same record as on one machine.

A training is told by the settings of its run. A worker that sees the files its rows are from reads
them there; else the rows are sent, once to each worker. What a training leaves comes back as files
and lines, and is written here: workers need no common disk. A training of a worker that is lost
is given to another: it goes on from its checkpoint if both see the run's folder, else from where it
was when it was sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit
from warnings import catch_warnings, filterwarnings

from fedvlm.data.table import Embedded
from fedvlm.engines.single import one_thread
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError
from fedvlm.machine import cores
from fedvlm.record import AWAY, Record, read_manifest
from fedvlm.runner.prepare import prepare
from fedvlm.runner.schedule import Order, Piece, here, named
from fedvlm.runner.settings import Settings
from fedvlm.runner.sight import Place, apart, sees, whole
from fedvlm.runner.train import train
from fedvlm.runner.training import file_name
from fedvlm.storage.files import busy, slug, write
from fedvlm.storage.sealed import write_json

LOCAL = "127.0.0.1"
FORMS = "dask (on this machine), dask://HOST:PORT, or tcp://127.0.0.1:PORT without TLS"


def carry(pieces: Sequence[Piece], on: str) -> None:
    """All of them, the longest first; one that fails is told as such, and the others go on."""
    several = len(pieces) > 1
    away = [piece for piece in pieces if piece.cost and _portable(piece)]
    for piece in pieces:
        if not piece.cost:  # it is done already
            here(piece, several)
    staying = [piece for piece in pieces if piece.cost and not _portable(piece)]
    if not away:
        _stay(staying, several)
        return
    with _client(on) as client, catch_warnings():
        from distributed import as_completed

        filterwarnings("ignore", message="Sending large graph")

        offers: dict[int, _Offer] = {}
        for piece in away:
            assert piece.order is not None
            if id(piece.order.rows) not in offers:
                offers[id(piece.order.rows)] = _Offer(client, piece, piece.order)
        asked = {_submit(client, piece, offers): piece for piece in away}
        _stay(staying, several)
        done = as_completed(list(asked))
        for future in done:
            piece = asked[future]
            found: Any = future.exception()
            if isinstance(found, Unseen):
                assert piece.order is not None
                offers[id(piece.order.rows)].place = None
                again = _submit(client, piece, offers)
                asked[again] = piece
                done.add(again)
                continue
            if found is None:
                found = _take(piece, *future.result())
            elif not isinstance(found, FedVLMError):
                found = FederationError(f"on the cluster: {type(found).__name__}: {found}")
            failed = isinstance(found, FedVLMError) and several
            piece.done(named(piece, found) if failed else found)


def _portable(piece: Piece) -> bool:
    """Images that are decoded on demand stay where they are, and so does who trains on them."""
    return piece.order is not None and piece.order.rows.images is None


def _stay(pieces: Sequence[Piece], several: bool) -> None:
    for piece in pieces:
        here(piece, several)


class Unseen(Exception):
    """A worker does not see the rows where they were said to be."""


class _Offer:
    """The rows of some trainings: where workers find them, or they themselves, sent once."""

    def __init__(self, client: Any, piece: Piece, order: Order) -> None:
        self.client, self.rows = client, order.rows
        self.bare, found = apart(order.settings, order.rows)
        in_files = not piece.record.manifest["memory"]
        seen = in_files and all(client.run(sees, found).values())
        self.place = found if seen else None

    @cached_property
    def thin(self) -> Any:
        return self.client.submit(_same, self.bare, pure=False)

    @cached_property
    def thick(self) -> Any:
        # rows as the result of a task: those of a lost worker are made again, unlike scattered ones
        return self.client.submit(_same, self.rows, pure=False)


def _submit(client: Any, piece: Piece, offers: Mapping[int, _Offer]) -> Any:
    order = piece.order
    assert order is not None
    offer = offers[id(order.rows)]
    rows = offer.thick if offer.place is None else offer.thin
    given = (order.settings, rows, offer.place, order.seed, order.training)
    record = (piece.record.folder.absolute(), piece.record.manifest, _begun(piece))
    return client.submit(there, *given, *record, pure=False, priority=piece.cost)


def _same(rows: Embedded) -> Embedded:
    return rows


Left = tuple[list[dict[str, Any]], dict[str, bytes]]  # lines and files of a training


def _begun(piece: Piece) -> Left:
    """What there is of a training that was stopped: its lines, and its checkpoint."""
    assert piece.order is not None
    name = f"{piece.order.seed}-{slug(piece.order.training)}"
    folder = piece.record.folder / "trainings"
    file = folder / f"{name}.checkpoint"
    if not file.exists() or (folder / f"{name}.local").exists():  # too much to be sent
        return [], {}
    lines = [line for line in piece.record.lines() if line["training"] == name]
    return lines, {file.name: file.read_bytes()}


def there(
    settings: Settings,
    rows: Embedded,
    place: Place | None,
    seed: int,
    name: str,
    run: Path,  # its folder, where the command is
    manifest: Mapping[str, Any],
    begun: Left,
) -> tuple[list[dict[str, Any]], dict[str, bytes], Any]:
    """What a worker does: a training in a folder of its own, given back as lines and files."""
    if place is not None:
        seen = whole(rows, place)
        if seen is None:
            raise Unseen
        rows = seen
    prepared = prepare(replace(settings, workers=1), rows, seed)
    (training,) = (one for one in prepared.trainings if one.name == name)
    called = file_name(training, seed)
    with _desk(run, called, manifest) as record, one_thread():
        folder = record.folder / "trainings"
        if not (folder / f"{called}.checkpoint").exists():
            for line in begun[0]:
                record.add_line(line)
            for file, data in begun[1].items():
                write(folder / file, data)
        found = train(prepared, training, record, lambda rounds: None)
        left = folder.glob(f"{called}.*")
        return record.lines(), {path.name: path.read_bytes() for path in left}, found


@contextmanager
def _desk(run: Path, name: str, manifest: Mapping[str, Any]) -> Iterator[Record]:
    """A record for one training: in the run's folder if it is seen from here, so that it outlives
    this worker; else, or if another worker is at it still, in a folder that goes with it."""
    with ExitStack() as stack:
        try:
            if read_manifest(run) != manifest:
                raise DataError("another run")
            record = Record(run / AWAY / name)
            stack.enter_context(record.lock())
        except (FedVLMError, OSError):
            record = Record(Path(stack.enter_context(TemporaryDirectory(prefix="fedvlm-"))))
        write_json(record.folder / "manifest.json", manifest)
        yield record


def collect(record: Record) -> None:
    """Takes into a record what lost trainings of an earlier cluster have left in its folder."""
    for folder in sorted((record.folder / AWAY).glob("*")):
        if busy(folder / ".lock"):  # a worker that nobody waits for any more
            continue
        left, trainings = folder / "trainings", record.folder / "trainings"
        checkpoint = f"{folder.name}.checkpoint"
        if (left / checkpoint).exists() and not (trainings / f"{folder.name}.json").exists():
            record.keep_lines(folder.name, 0)
            for line in Record(folder).lines():
                record.add_line(line)
            trainings.mkdir(exist_ok=True)
            for file in (left / f"{folder.name}.local", left / checkpoint):
                if file.exists():
                    file.replace(trainings / file.name)
        rmtree(folder, ignore_errors=True)


def _take(
    piece: Piece, lines: Sequence[Mapping[str, Any]], files: Mapping[str, bytes], found: Any
) -> Any:
    """Writes what came back; the outcome goes last, for it says that a training is done."""
    assert piece.order is not None
    name = f"{piece.order.seed}-{slug(piece.order.training)}"
    folder = piece.record.folder / "trainings"
    try:
        have = [line for line in piece.record.lines() if line["training"] == name]
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(have, lines, strict=False))))
        piece.record.keep_lines(name, same)  # and tells nobody twice of what was there before
        for line in lines[same:]:
            piece.record.add_line(line)
        for file in sorted(files, key=lambda one: one == f"{name}.json"):
            write(folder / file, files[file])
        for end in ("checkpoint", "local"):  # of an earlier run, on one machine
            (folder / f"{name}.{end}").unlink(missing_ok=True)
        rmtree(piece.record.folder / AWAY / name, ignore_errors=True)
        with suppress(OSError):  # others are there still, or it never was
            (piece.record.folder / AWAY).rmdir()
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
