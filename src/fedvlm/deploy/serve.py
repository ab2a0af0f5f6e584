"""The life of a site's process: it answers what its SuperNode brings, whatever comes in."""

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

from fedvlm.deploy.events import EventLogger
from fedvlm.deploy.flower.client_app import SITE_SOCKET_VARIABLE, receive_message, send_messages
from fedvlm.deploy.flower.gate import SECRET_FILE as CONTROL
from fedvlm.deploy.flower.gate import TOKEN_FOLDER_VARIABLE, new_secret
from fedvlm.deploy.flower.kin import SUPEREXEC_ENDED
from fedvlm.deploy.flower.processes import Process, Unreachable, check_server, start_supernode
from fedvlm.deploy.flower.supernode import CONNECTION_LOST
from fedvlm.deploy.kits import SiteKit, write_secret
from fedvlm.deploy.membership import describe_validity, read_own_certificate
from fedvlm.deploy.site import PrintLine, Site
from fedvlm.errors import FederationError
from fedvlm.storage.files import exclusive_lock


def serve_site(kit: SiteKit, print_line: PrintLine, stop: Event | None = None) -> None:
    """The life of a site's process: answers what its SuperNode brings, until it is stopped."""
    certificate = read_own_certificate(kit.folder)
    site = Site(kit, print_line)
    log_event = site.log_event
    stop = stop or Event()
    with (
        exclusive_lock(kit.folder / ".lock", f"site {kit.name} is already running in {kit.folder}"),
        TemporaryDirectory(prefix="fedvlm-") as place,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        bin = Path(place) / "bin"
        bin.mkdir()
        _write_script(bin / "flower-superexec", "superexec", "run_at_site")
        write_secret(Path(place) / CONTROL, new_secret())
        listener.bind(str(Path(place) / "desk"))
        listener.listen(8)
        listener.settimeout(0.5)
        until = describe_validity(certificate.days_left, kit.folder)
        log_event("connecting", site=kit.name, address=kit.address, until=until)
        if not _wait_for_server(kit, log_event, stop):
            return
        node = _start_node(kit, bin, place)
        try:
            while not stop.is_set():
                if not node.alive:
                    raise FederationError(describe_supernode_exit(kit, node))
                try:
                    stream, _ = listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # as when no file can be opened for a while
                    log_event("said", text=f"a request was not taken ({error})")
                    stop.wait(0.5)
                    continue
                with stream:
                    answer_request(site, stream)
        finally:
            node.stop()


def answer_request(site: Site, stream: socket.socket) -> None:
    """Whatever comes in, and whatever comes of it, the site goes on."""
    stream.settimeout(60)
    try:
        send_messages(stream, site.answer(receive_message(stream), receive_message(stream)))
    except Exception as error:
        with suppress(Exception):  # also if nobody reads what the site says
            site.log_text(f"a request was not answered ({type(error).__name__}: {error})")


def _wait_for_server(kit: SiteKit, log_event: EventLogger, stop: Event) -> bool:
    """Waits for the server as long as it takes, and says why it is not reached."""
    last_error = ""
    while not stop.is_set():
        try:
            check_server(kit.address, kit.folder / "ca.crt")
            log_event("reached")
            return True
        except Unreachable as error:
            if last_error != (last_error := str(error)):
                log_event("unreachable", why=last_error)
        stop.wait(1.0)
    return False


def _start_node(kit: SiteKit, bin: Path, place: str) -> Process:
    source = str(Path(__file__).resolve().parents[2])  # as this process found fedvlm
    paths = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {SITE_SOCKET_VARIABLE: str(Path(place) / "desk"), TOKEN_FOLDER_VARIABLE: place, "PYTHONPATH": paths}
    return start_supernode(kit, bin, environment)


def _write_script(path: Path, module: str, main: str) -> None:
    """A program of this name, to be found before Flower's own."""
    named = f"from fedvlm.deploy.flower.{module} import {main}"
    path.write_text(f"#!{sys.executable}\n{named}\n{main}()\n")
    path.chmod(0o700)


def describe_supernode_exit(kit: SiteKit, node: Process) -> str:
    """Why a SuperNode ended, in words that help."""
    log_tail = node.tail()
    causes = [cause for cause in (SUPEREXEC_ENDED, CONNECTION_LOST) if cause in log_tail]
    if node.killed:
        causes.append(f"its SuperNode was ended by {node.killed}")
    if causes:
        return f"site {kit.name} stopped, for {causes[0]}; start it again. Flower says:\n{log_tail}"
    return (
        f"site {kit.name} is not let in at {kit.address}, or no longer; either its key is not "
        "known there, because it was revoked or renewed, has expired, or is of another federation "
        "(ask the server's people, who see it by `fedvlm deploy keys`), or a copy of the kit is "
        "connected (or was, a minute ago), or the server has a new database (start the site "
        f"again). Flower says:\n{log_tail}"
    )
