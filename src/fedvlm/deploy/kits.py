"""Create, read, back up and restore the folders of a federation: one for the server and one kit per site."""

import os
import re
import shutil
import sqlite3
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from fedvlm.core.schema import COUNT, NON_NEGATIVE, POSITIVE_FRACTION, ranged_field, read_table
from fedvlm.deploy.flower.network import LOOPBACK_NAMES, join_address, split_address
from fedvlm.deploy.identity import certificates
from fedvlm.deploy.identity.keys import create_certificates, create_key_pair
from fedvlm.deploy.operations.webhook import check_webhook
from fedvlm.deploy.site.peers import Peer, write_peers
from fedvlm.deploy.site.policy import POLICY_FILE, example_policy
from fedvlm.errors import DataError, SettingsError
from fedvlm.runner.experiment_files import read_toml
from fedvlm.storage import files

SITE_NAME = re.compile(r"\w[\w .-]{0,62}")
INVITATION_FILE = "invitation.json"  # in the server's folder, for sites that are to join
KIT_FORMAT = 2  # of server.toml, site.toml and the messages between them
REFERENCE_FILE = "reference.safetensors"  # in the server's folder, for methods that need one
RUN_REQUEST_FILE = "request.json"  # in the server's folder: the run that is asked for
RUN_STATES_FILE = "run-states.json"  # in the server's folder: "running" or "ended" for each run since its start
RECORDS_FILE = "records.json"  # in the server's folder: records of its runs elsewhere
STOP_FILE = "stop.json"  # in the server's folder: the runs to stop
SITE_README = """This folder belongs to the site alone: `key` is its secret.
Read policy.toml: it says what this site allows, whatever the server asks.
Start the site: fedvlm deploy site {} --data IMAGES --encoder ENCODER
"""
SERVER_README = """Keep this folder on the server: all *.key files are its secrets.
Give invitation.json to sites that should join; fedvlm deploy admit admits them.
Start the server: fedvlm deploy server server
Run an experiment over the sites: fedvlm deploy run server experiment.toml
"""
K = TypeVar("K")
HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True)
class ServerKit:
    """Hold server.toml of the server's folder."""

    folder: Path
    address: str  # host:port, as the sites reach it
    listen: str = ""  # host:port on this machine; empty: the port of `address`, on all interfaces
    sites: tuple[str, ...] = ()  # that have a certificate in `sites/`
    quorum: float = ranged_field(0.5, POSITIVE_FRACTION)  # share of the sites asked that must answer
    deadline: float = ranged_field(600.0, NON_NEGATIVE)  # seconds a site has for one round
    wait: float = ranged_field(120.0, NON_NEGATIVE)  # seconds to wait for sites before the first round
    max_samples: int = ranged_field(1_000_000, COUNT)  # training rows a site is believed to have at most
    plain: bool = False  # runs may ask for single uploads without noise; otherwise for verified sums
    rehearsal: bool = False  # sites play clients of the experiment's own data
    webhook: str = ""  # address that is told when a run ends or a site is late


@dataclass(frozen=True)
class SiteKit:
    """Hold site.toml of a site's kit."""

    folder: Path
    name: str
    address: str  # of the server, host:port
    data: str = ""  # a path or name, as `fedvlm run --data`
    encoder: str = ""
    source: dict[str, Any] = field(default_factory=dict)  # how to read the data
    access: dict[str, Any] = field(default_factory=dict)  # how to reach the encoder
    descriptions: str = ""  # a file of descriptions of the classes, the same at every site
    texts: str = ""  # a file of descriptions that only this site brings, under its name
    test_only: bool = False  # all samples are test samples of evaluations; nothing is trained here
    plays: str = ""  # in a rehearsal: the client of the whole data that this site is
    made_by_server: bool = False  # its key was created on the server, for a rehearsal
    webhook: str = ""  # address that is told when a request needs a person's consent


def _read(kind: type[K], path: Path) -> K:
    if not path.exists():
        raise SettingsError(
            f"there is no {path}; name a folder that `fedvlm deploy init` wrote, as DIR/server, or at a site one that "
            "`fedvlm deploy accept` has filled"
        )
    table = read_toml(path)
    if (kit_format := table.pop("format", 1)) != KIT_FORMAT:
        raise SettingsError(
            f"{path}: this fedvlm needs kits of format {KIT_FORMAT}, got format {kit_format}; create new kits: fedvlm "
            "deploy init"
        )
    check_webhook(str(table.get("webhook", "")))
    return read_table(kind, str(path), table, ": ", folder=path.parent)


def read_server(folder: Path) -> ServerKit:
    return replace(_read(ServerKit, folder / "server.toml"), sites=tuple(certificates.admitted_sites(folder)))


def read_site(folder: Path) -> SiteKit:
    return _read(SiteKit, folder / "site.toml")


def with_options(kit: SiteKit, options: Mapping[str, Any]) -> SiteKit:
    data = str(options.get("data", ""))
    place = {"data": str(Path(data).resolve())} if data and Path(data).exists() else {}
    return replace(kit, **{**options, **place})


def is_host(text: str) -> bool:
    """Return whether a text is a host's name, or an IPv4 or IPv6 address."""
    try:
        return bool(ip_address(text)) and "%" not in text
    except ValueError:
        return bool(HOST_NAME.fullmatch(text))


def listen_address(kit: ServerKit) -> tuple[str, int]:
    """Return the host and the port that the server listens on; an IPv6 name listens on IPv6."""
    host, port = split_address(kit.address)
    if kit.listen:
        return split_address(kit.listen)
    return host if host in LOOPBACK_NAMES else "::" if ":" in host else "0.0.0.0", port


def local_address(kit: ServerKit) -> str:
    """Return the address at which this machine reaches its own server."""
    host, port = listen_address(kit)
    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def write_site(kit: SiteKit) -> None:
    values = {option.name: getattr(kit, option.name) for option in fields(kit) if option.name != "folder"}
    table = {"format": KIT_FORMAT, **{name: value for name, value in values.items() if value}}
    files.write_file(kit.folder / "site.toml", files.to_toml(table).encode())


def create_kits(folder: Path, sites: Sequence[str], host: str, port: int, **server: Any) -> list[Path]:
    """Create the server's folder, and for a rehearsal a kit per site with a key made here."""
    for name in sites:
        check_name(name)
    if len({name.casefold() for name in sites}) < len(sites):
        raise SettingsError(f"the sites {', '.join(sites)} are not all different; name each once")
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"{folder} is not empty; kits hold keys and are never overwritten: choose a new folder")
    if not is_host(host) or not 0 < port < 65536:
        raise SettingsError(
            f"host = {host!r} and port = {port} are not an address; name the server as the sites reach it, e.g. "
            "clinic.example or 192.0.2.7, and a port up to 65535"
        )
    address = join_address(host, port)
    listen_address(ServerKit(folder, address, **server))  # refuse a wrong one before anything is written
    signing, server_pub = create_key_pair()
    papers = create_certificates(host)
    central = folder / "server"
    for path in (folder, central, central / certificates.SITES_FOLDER, *(folder / f"site-{name}" for name in sites)):
        files.make_private_folder(path)
    write_secret(central / "signing.key", signing)
    for name in ("server.key", "ca.key"):
        write_secret(central / name, papers[name])
    for file, data in (
        ("ca.crt", papers["ca.crt"]),
        ("server.pem", papers["server.pem"]),
        ("server.toml", files.to_toml({"format": KIT_FORMAT, "address": address, **server}).encode()),
        ("README.txt", SERVER_README.encode()),
    ):
        files.write_file(central / file, data)
    words = {"address": address, "ca": papers["ca.crt"].decode(), "server": server_pub.decode()}
    certificates.write_document(central / INVITATION_FILE, "invitation", words)
    for name in sites:
        private_key, public = create_key_pair()
        write_secret(folder / f"site-{name}" / "key", private_key)
        certificate = certificates.issue_certificate(central, address, name, public)
        fill_site_folder(
            folder / f"site-{name}", certificate, certificates.certificate_path(central, name).read_bytes()
        )
        write_site(replace(read_site(folder / f"site-{name}"), made_by_server=True))
        if server.get("plain"):
            files.write_file(folder / f"site-{name}" / POLICY_FILE, example_policy(plain=True).encode())
    for name in sites:  # in a rehearsal nobody has to compare keys that were made here
        others = [other for other in sites if other != name]
        peers = [Peer(other, certificates.current_certificate(central, other).fingerprint, "init") for other in others]
        write_peers(folder / f"site-{name}", peers)
    return [central, *(folder / f"site-{name}" for name in sites)]


def fill_site_folder(folder: Path, site_certificate: certificates.SiteCertificate, certificate: bytes) -> None:
    """Fill a site's folder with what its server sent; the site's own files stay as they are."""
    for file, data in (
        (certificates.CERTIFICATE_FILE, certificate),
        ("server.pub", site_certificate.server.encode()),
        ("ca.crt", site_certificate.ca.encode()),
    ):
        files.write_file(folder / file, data, 0o600)
    for file, text in ((POLICY_FILE, example_policy()), ("README.txt", SITE_README.format(folder.name))):
        if not (folder / file).exists():
            files.write_file(folder / file, text.encode())
    kit = read_site(folder) if (folder / "site.toml").exists() else SiteKit(folder, site_certificate.site, "")
    kit = replace(kit, name=site_certificate.site, address=site_certificate.address)
    write_site(replace(kit, made_by_server=False))


def check_name(name: str) -> None:
    if not SITE_NAME.fullmatch(name):
        raise SettingsError(f"the site name {name!r} is invalid; use at most 63 letters, digits, spaces, dots, - and _")


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        os.fsync(file.fileno())


def record_folders(folder: Path) -> dict[str, Path]:
    """Return the records of a server's runs by name; one outside its folder is named by its path."""
    inside = {path.parent.name: path.parent for path in sorted((folder / "runs").glob("*/manifest.json"))}
    listed = files.read_json(folder / RECORDS_FILE) if (folder / RECORDS_FILE).exists() else []
    return inside | {path: Path(path) for path in listed if (Path(path) / "manifest.json").exists()}


def register_record(folder: Path, record: Path) -> None:
    """Register a record outside the server's folder, so that its commands find it."""
    place = record.resolve()
    if place.parent != (folder / "runs").resolve() and str(place) not in record_folders(folder):
        listed = files.read_json(folder / RECORDS_FILE) if (folder / RECORDS_FILE).exists() else []
        files.write_json(folder / RECORDS_FILE, [*(path for path in listed if path != str(place)), str(place)])


KIT_FILES = ("server.toml", "site.toml")  # one of them makes a folder a server's or a site's
SESSION_KEY_FILE = "session.key"  # of a verified sum: a restored folder must not continue an old session
SQLITE_SIDE_FILES = (".db-wal", ".db-shm")  # of a database that is copied by its own means


def write_backup(folder: Path, file: Path) -> int:
    """Write a backup file and return how many files it holds; a server may be running, a site must not."""
    if not any((folder / name).is_file() for name in KIT_FILES):
        raise SettingsError(f"{folder} is neither a server's folder nor a site's kit; name one")
    if file.exists():
        raise SettingsError(f"{file} exists already and is not overwritten; name a new file")
    if file.resolve().is_relative_to(folder.resolve()):
        raise SettingsError(f"{file} is inside {folder}, which it is a backup of; name a file elsewhere")
    if not file.parent.is_dir():
        raise SettingsError(f"there is no folder {file.parent} for the backup; create it first")
    is_site = (folder / "site.toml").is_file()
    message = f"site {folder} is running, and its ledger must not change meanwhile; stop the site first"
    with files.exclusive_lock(folder / ".lock", message) if is_site else nullcontext(), _snapshot(folder) as copy:
        files.write_index(copy)
        stored = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
        names = [files.INDEX_FILE, *sorted(stored - {files.INDEX_FILE})]
        with files.atomic_write(file) as draft_path:
            os.close(os.open(draft_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with tarfile.open(draft_path, "w") as archive:
                for name in names:
                    archive.add(copy / name, name, recursive=False)
    return len(names) - 1


def restore_backup(file: Path, folder: Path) -> int:
    """Restore a backup into a new folder if it is intact; return the number of files."""
    if folder.exists():
        raise SettingsError(f"{folder} exists already; keys are never overwritten: name a new folder")
    if not file.is_file():
        raise SettingsError(f"there is no backup {file}; name a file that `fedvlm deploy backup` wrote")
    if not folder.parent.is_dir():
        raise SettingsError(f"there is no folder {folder.parent} to restore into; create it first")
    with files.explain_os_errors(folder), tempfile.TemporaryDirectory(dir=folder.parent) as place:
        made = Path(place) / "folder"
        files.make_private_folder(made)
        try:
            with tarfile.open(file, "r:") as archive:
                archive.extractall(made, filter="data")
            bad = files.check_index(made)
            paths = {str(path.relative_to(made)) for path in made.rglob("*") if not path.is_dir() or path.is_symlink()}
            unlisted = paths - {files.INDEX_FILE, *files.read_json(made / files.INDEX_FILE)["files"]}
        except (OSError, tarfile.TarError, DataError, KeyError, TypeError) as error:
            raise DataError(f"{file} is not a complete backup ({error}); use another backup") from error
        if bad:
            name, problem = next(iter(bad.items()))
            raise DataError(f"{file} is damaged: {name} {problem}; use another backup")
        if unlisted:
            raise DataError(
                f"{file} holds {min(unlisted)[:80]!r}, which is not in its index: somebody added it; use another backup"
            )
        (made / files.INDEX_FILE).unlink()
        made.rename(folder)
    return len(paths) - 1


@contextmanager
def _snapshot(folder: Path) -> Iterator[Path]:
    """Copy the files of a folder at one moment: databases by their own backup, no locks, no drafts."""
    with tempfile.TemporaryDirectory() as place:
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path.is_symlink() or path.name[0] == ".":
                continue
            if path.name.endswith(SQLITE_SIDE_FILES) or path.name == SESSION_KEY_FILE:
                continue
            target = Path(place) / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".jsonl":  # a line that is being written is not in it yet
                data = path.read_bytes()
                files.write_file(target, data[: data.rfind(b"\n") + 1], stat.S_IMODE(path.stat().st_mode))
            elif path.suffix == ".db":
                with closing(sqlite3.connect(path)) as source_db, closing(sqlite3.connect(target)) as two:
                    source_db.backup(two)
                target.chmod(0o600)
            else:
                with suppress(FileNotFoundError):  # a running server has just replaced or removed it
                    shutil.copy2(path, target)
        yield Path(place)
