"""The life of a site's process: it answers what its SuperNode brings, whatever comes in."""

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

from fedvlm.deploy.events import Note
from fedvlm.deploy.flower.client_app import DESK, receive, send_all
from fedvlm.deploy.flower.gate import NAME as CONTROL
from fedvlm.deploy.flower.gate import PASS, new_secret
from fedvlm.deploy.flower.kin import ENDED
from fedvlm.deploy.flower.processes import Process, Unreachable, knock, supernode
from fedvlm.deploy.flower.supernode import LOST
from fedvlm.deploy.kits import SiteKit, secret
from fedvlm.deploy.membership import lasting, own
from fedvlm.deploy.site import Say, Site
from fedvlm.errors import FederationError
from fedvlm.storage.files import alone


def serve(kit: SiteKit, say: Say, stop: Event | None = None) -> None:
    """The life of a site's process: answers what its SuperNode brings, until it is stopped."""
    standing = own(kit.folder)
    site = Site(kit, say)
    note = site.note
    stop = stop or Event()
    with (
        alone(kit.folder / ".lock", f"site {kit.name} is already running in {kit.folder}"),
        TemporaryDirectory(prefix="fedvlm-") as place,
        socket.socket(socket.AF_UNIX) as door,
    ):
        bin = Path(place) / "bin"
        bin.mkdir()
        _script(bin / "flower-superexec", "superexec", "at_site")
        secret(Path(place) / CONTROL, new_secret())
        door.bind(str(Path(place) / "desk"))
        door.listen(8)
        door.settimeout(0.5)
        until = lasting(standing.days, kit.folder)
        note("connecting", site=kit.name, address=kit.address, until=until)
        if not _reach(kit, note, stop):
            return
        node = _node(kit, bin, place)
        try:
            while not stop.is_set():
                if not node.alive:
                    raise FederationError(refusal(kit, node))
                try:
                    stream, _ = door.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # as when no file can be opened for a while
                    note("said", text=f"a request was not taken ({error})")
                    stop.wait(0.5)
                    continue
                with stream:
                    answer_one(site, stream)
        finally:
            node.stop()


def answer_one(site: Site, stream: socket.socket) -> None:
    """Whatever comes in, and whatever comes of it, the site goes on."""
    stream.settimeout(60)
    try:
        send_all(stream, site.answer(receive(stream), receive(stream)))
    except Exception as error:
        with suppress(Exception):  # also if nobody reads what the site says
            site.say(f"a request was not answered ({type(error).__name__}: {error})")


def _reach(kit: SiteKit, note: Note, stop: Event) -> bool:
    """Waits for the server as long as it takes, and says why it is not reached."""
    said = ""
    while not stop.is_set():
        try:
            knock(kit.address, kit.folder / "ca.crt")
            note("reached")
            return True
        except Unreachable as error:
            if said != (said := str(error)):
                note("unreachable", why=said)
        stop.wait(1.0)
    return False


def _node(kit: SiteKit, bin: Path, place: str) -> Process:
    source = str(Path(__file__).resolve().parents[2])  # as this process found fedvlm
    paths = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {DESK: str(Path(place) / "desk"), PASS: place, "PYTHONPATH": paths}
    return supernode(kit, bin, environment)


def _script(path: Path, module: str, main: str) -> None:
    """A program of this name, to be found before Flower's own."""
    named = f"from fedvlm.deploy.flower.{module} import {main}"
    path.write_text(f"#!{sys.executable}\n{named}\n{main}()\n")
    path.chmod(0o700)


def refusal(kit: SiteKit, node: Process) -> str:
    """Why a SuperNode ended, in words that help."""
    said = node.tail()
    causes = [cause for cause in (ENDED, LOST) if cause in said]
    if node.killed:
        causes.append(f"its SuperNode was ended by {node.killed}")
    if causes:
        return f"site {kit.name} stopped, for {causes[0]}; start it again. Flower says:\n{said}"
    return (
        f"site {kit.name} is not let in at {kit.address}, or no longer; either its key is not "
        "known there, because it was revoked or renewed, has expired, or is of another federation "
        "(ask the server's people, who see it by `fedvlm deploy keys`), or a copy of the kit is "
        "connected (or was, a minute ago), or the server has a new database (start the site "
        f"again). Flower says:\n{said}"
    )
