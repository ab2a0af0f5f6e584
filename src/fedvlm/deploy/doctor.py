"""Looks at a server's or a site's folder before anything runs: each line is well, or what to do."""

import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from fedvlm.deploy.flower.processes import Unreachable, hear, knock
from fedvlm.deploy.kits import ServerKit, SiteKit, read_server, read_site
from fedvlm.deploy.standing import server_days
from fedvlm.deploy.status import is_server
from fedvlm.errors import FedVLMError
from fedvlm.storage.files import busy

ROOM = 1 << 30  # bytes that should be free
SOON = 30  # days of a certificate that are few
SKEW = 60.0  # seconds that clocks may differ by


@dataclass(frozen=True)
class Finding:
    what: str
    well: bool
    said: str  # what was found, or what to do


Look = Callable[[], str]  # what was found; an error is what is wrong


def examine(folder: Path) -> list[Finding]:
    looks = _server(read_server(folder)) if is_server(folder) else _site(read_site(folder))
    return [_tried(what, look) for what, look in (*_both(folder), *looks)]


def _tried(what: str, look: Look) -> Finding:
    try:
        return Finding(what, True, look())
    except FedVLMError as error:
        return Finding(what, False, str(error))
    except Exception as error:  # a doctor who faints helps nobody
        return Finding(what, False, f"{type(error).__name__}: {error}")


class Ill(FedVLMError):
    """What is wrong, with the remedy."""


def _both(folder: Path) -> Iterator[tuple[str, Look]]:
    yield "versions", _versions
    yield "disk", lambda: _disk(folder)
    yield "folder", lambda: _private(folder)


def _versions() -> str:
    from importlib.metadata import version

    import fedvlm
    from fedvlm.engines.flower import api

    api.flower()
    return (
        f"fedvlm {fedvlm.__version__}, flwr {version('flwr')}, torch {version('torch')}, "
        f"Python {sys.version.split()[0]}"
    )


def _disk(folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    if free < ROOM:
        raise Ill(f"{free / 1e9:.1f} GB are free at {folder}; make room, 1 GB is little")
    return f"{free / 1e9:.0f} GB are free"


def _private(folder: Path) -> str:
    if folder.stat().st_mode & 0o077:
        raise Ill(f"others on this machine can look into {folder}; chmod 700 {folder}")
    return "only its owner can look into it"


def _server(kit: ServerKit) -> Iterator[tuple[str, Look]]:
    host, _, port = kit.address.rpartition(":")
    yield "name", lambda: _resolved(host)
    yield "port", lambda: _port(kit, int(port))
    yield "certificate", lambda: _days(server_days(kit.folder), "fedvlm deploy renew")
    yield "sites", lambda: _sites(kit)
    yield "from outside", lambda: _outside(kit.address, kit.folder)


def _resolved(host: str) -> str:
    try:
        found = sorted({str(one[4][0]) for one in socket.getaddrinfo(host, None)})
    except OSError as error:
        raise Ill(
            f"{host} is no name that this machine can resolve ({error}); look at DNS, or name the "
            "server by its address"
        ) from error
    return f"{host} is {', '.join(found)}"


def _port(kit: ServerKit, port: int) -> str:
    if busy(kit.folder / ".lock"):
        return f"{port} is served by this folder's server"
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError as error:
            raise Ill(
                f"{port} is taken ({error.strerror}); stop the other program, or choose another "
                "port in server.toml and in the kits"
            ) from error
    return f"{port} is free; the server is not running"


def _days(days: int, remedy: str) -> str:
    if days < SOON:
        raise Ill(f"it lasts {days} days more; {remedy}")
    return f"it lasts {days} days"


def _sites(kit: ServerKit) -> str:
    if not kit.sites:
        raise Ill(
            "no site is admitted; send them the invitation, then fedvlm deploy admit "
            f"{kit.folder} REQUEST"
        )
    return ", ".join(kit.sites)


def _outside(address: str, folder: Path) -> str:
    """The server by the name that sites use, with its certificate, and its clock."""
    try:
        knock(address, folder / "ca.crt")
    except Unreachable as error:
        remedy = "start the server, and open the port in firewalls on the way"
        raise Ill(f"{error}; {remedy}") from error
    there = parsedate_to_datetime(hear(address, folder / "ca.crt"))
    skew = (datetime.now(UTC) - there).total_seconds()
    if abs(skew) > SKEW:
        raise Ill(f"its clock and this machine's differ by {skew:.0f} s; set them by NTP")
    return f"{address} answers with the right certificate; clocks differ by {abs(skew):.0f} s"


def _site(kit: SiteKit) -> Iterator[tuple[str, Look]]:
    host = kit.address.rpartition(":")[0]
    yield "name", lambda: _resolved(host)
    yield "certificate", lambda: _days(_own_days(kit), f"fedvlm deploy renew {kit.folder}")
    yield "server", lambda: _outside(kit.address, kit.folder)
    yield "encoder", lambda: _encoder(kit)
    yield "images", lambda: _images(kit)
    yield "policy", lambda: _policy(kit)


def _own_days(kit: SiteKit) -> int:
    from fedvlm.deploy.membership import own

    return own(kit.folder).days


def _encoder(kit: SiteKit) -> str:
    from fedvlm.encoders import fingerprint
    from fedvlm.runner.load import reach

    if kit.plays:
        return "the experiment's, in a rehearsal"
    if not kit.encoder:
        raise Ill(f"none is named: fedvlm deploy site {kit.folder} --encoder NAME --data IMAGES")
    if kit.encoder.startswith("store:"):
        return kit.encoder
    encoder, _ = reach(kit.encoder, kit.access)
    return f"{kit.encoder} loads; its fingerprint is {fingerprint(encoder)[:16]}"


def _images(kit: SiteKit) -> str:
    from fedvlm.runner.load import open_data

    if kit.plays or kit.encoder.startswith("store:"):
        return "none of its own to read"
    if not kit.data:
        raise Ill(f"none are named: fedvlm deploy site {kit.folder} --data IMAGES --encoder NAME")
    dataset = open_data(kit.data, kit.source)
    return f"{len(dataset.labels)} images of {len(dataset.classes)} classes: " + ", ".join(
        dataset.classes[:8]
    )


def _policy(kit: SiteKit) -> str:
    from fedvlm.deploy.explain import explain
    from fedvlm.deploy.policy import read_policy

    return " ".join(explain(read_policy(kit.folder)))
