"""Start Flower's processes quietly, and always stop them again."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from http.client import HTTPSConnection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from fedvlm.deploy.flower.access import FORBIDDEN, SECRET_FILE, TOKEN_FOLDER_VARIABLE, new_secret
from fedvlm.deploy.flower.site import NODE_FILE_VARIABLE
from fedvlm.deploy.kits import ServerKit, SiteKit, write_secret
from fedvlm.engines.flower import QUIET_ENVIRONMENT
from fedvlm.errors import FederationError, SettingsError
from fedvlm.storage.files import open_for_append, write_file

CONNECTION_NAME = "fedvlm"  # the name of our connection in Flower's own settings
SITE_POLL_SECONDS = "0.1"  # seconds between looks of a site's SuperExec for work, on its own machine
SERVER_POLL_SECONDS = "0.5"  # at the server, where work is a run
POLL_VARIABLE = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
PORT_VARIABLE_PREFIX = "FLWR_INTERNAL_GRPC_"
DATABASE_FILE = "superlink.db"  # Flower's own, in the server's folder
CLI_TIMEOUT_SECONDS = 120.0  # seconds that Flower's command line has
START_TIMEOUT_SECONDS = 60.0  # seconds a SuperLink has to come up


def flower_environment(home: Path, first: Path | None = None) -> dict[str, str]:
    """Return the environment of Flower's processes: own folder, no telemetry, programs of `first` before any others."""
    overrides = {"FLWR_HOME": str(home.resolve()), POLL_VARIABLE: SITE_POLL_SECONDS}
    if first is not None:
        overrides["PATH"] = os.pathsep.join([str(first), os.environ.get("PATH", "")])
    # With these Flower opens two more ports, and nobody watches them.
    inherited = {key: setting for key, setting in os.environ.items() if not key.startswith(PORT_VARIABLE_PREFIX)}
    return {**inherited, **QUIET_ENVIRONMENT, **overrides}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """Run a child process with a log file, in a process group that ends with it."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]):
        self.name, self.log, self.stop_requested = name, log, False
        with open_for_append(log) as file:
            self.log_start = file.seek(0, os.SEEK_END)
            self.child = subprocess.Popen(
                list(command),
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env=dict(env),
                start_new_session=True,
                umask=0o077,  # its own files are nobody else's
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    @property
    def killed(self) -> str:
        """Return the name of the signal that ended it, if one did."""
        code = self.child.poll() or 0
        return signal.Signals(-code).name if code < 0 else ""

    def tail(self, lines: int = 12) -> str:
        """Return the last log lines of this process."""
        text = self.log.read_bytes()[self.log_start :].decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def ask_to_stop(self) -> None:
        if not self.stop_requested:  # a second signal would disturb its leaving
            self.stop_requested = True
            self._signal(signal.SIGTERM)

    def stop(self) -> None:
        self.ask_to_stop()
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(8)
        self._signal(signal.SIGKILL)  # also what the child left behind in its group
        self.child.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)


def _end_with_parent() -> None:
    """End the child when its parent is killed."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def start_superlink(kit: ServerKit) -> Process:
    """Start the server's SuperLink and wait until it answers; sites can connect from then on."""
    host, _, port = kit.address.rpartition(":")
    local = host in ("127.0.0.1", "localhost")
    env = flower_environment(flower_home(kit)) | {POLL_VARIABLE: SERVER_POLL_SECONDS}
    if not (kit.folder / SECRET_FILE).exists():  # of an `init` that made none
        write_secret(kit.folder / SECRET_FILE, new_secret())
    command = [
        *(sys.executable, "-m", "fedvlm.deploy.flower.server", "superlink", str(kit.folder.resolve())),
        *("127.0.0.1" if local else "0.0.0.0", port),
    ]
    write_connection(kit)
    link = Process("superlink", command, kit.folder / "superlink.log", env)
    try:
        _wait_until_up(kit, link)
    except BaseException:
        link.stop()
        raise
    return link


def flower_home(kit: ServerKit) -> Path:
    return kit.folder / "flwr"


def write_connection(kit: ServerKit) -> None:
    """Tell Flower's command line how to reach this server."""
    _, _, port = kit.address.rpartition(":")
    text = (
        f'[superlink]\ndefault = "{CONNECTION_NAME}"\n[superlink.{CONNECTION_NAME}]\n'
        f'address = "localhost:{port}"\nroot-certificates = "{kit.folder.resolve()}/ca.crt"\n'
    )
    write_file(flower_home(kit) / "config.toml", text.encode())


def is_server_up(kit: ServerKit) -> bool:
    """Return whether the server of this folder is up, on this machine."""
    _, _, port = kit.address.rpartition(":")
    try:
        check_server(f"localhost:{port}", kit.folder / "ca.crt")
    except Unreachable:
        return False
    return True


def _wait_until_up(kit: ServerKit, link: Process) -> None:
    end = monotonic() + START_TIMEOUT_SECONDS
    while monotonic() < end:
        if not link.alive:
            raise FederationError(describe_exit(link))
        if is_server_up(kit):
            return _check_access_denied(kit)
        sleep(0.1)
    raise FederationError(f"the SuperLink did not come up in {START_TIMEOUT_SECONDS:g} s:\n{link.tail()}")


def describe_exit(link: Process) -> str:
    """Explain why a SuperLink ended, with the remedy."""
    how = f", by {link.killed}" if link.killed else ""
    remedy = "start the server again"
    if "sqlite3.DatabaseError" in link.tail():
        database = link.log.with_name(DATABASE_FILE)
        remedy = (
            f"{database} is damaged: move it away, then start the server and the sites again (no record is in it; "
            "repeat the command of a run to resume it)"
        )
    elif "sqlite3.OperationalError" in link.tail():
        remedy = "its database cannot be written: check the disk, and start the server again"
    return f"the SuperLink ended{how}; {remedy}. Its log ends with:\n{link.tail()}"


def _check_access_denied(kit: ServerKit) -> None:
    """Check that an outsider is refused: another version of Flower might bypass the access control."""
    port = int(kit.address.rpartition(":")[2])
    context = tls_context(kit.folder / "ca.crt")
    call = HTTPSConnection("localhost", port, context=context, timeout=START_TIMEOUT_SECONDS)
    with closing(call):
        call.request("POST", "/v1/control/list-runs")
        status = call.getresponse().status
    if status != FORBIDDEN:
        raise FederationError(
            f"the SuperLink answers outsiders ({status} instead of {FORBIDDEN}), so it was stopped; this version of "
            "Flower was not tested: pip install 'fedvlm[flower]' again"
        )


class Unreachable(FederationError):
    """The server does not answer yet."""


def tls_context(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:  # also where it is no certificate
        raise SettingsError(
            f"{ca} is missing or not a certificate ({error}); restore the folder as fedvlm wrote it"
        ) from error


def server_date(address: str, ca: Path) -> str:
    """Return the time of the server's clock, as HTTP formats it."""
    host, _, port = address.rpartition(":")
    context = tls_context(ca)
    call = HTTPSConnection(host, int(port), context=context, timeout=5)
    with closing(call):
        call.request("GET", "/")
        return str(call.getresponse().headers["date"])


def check_server(address: str, ca: Path) -> None:
    """Return if our server is there; raise different errors if another one is, or none."""
    host, _, port = address.rpartition(":")
    context = tls_context(ca)
    try:
        with socket.create_connection((host, int(port)), 5) as plain, context.wrap_socket(plain, server_hostname=host):
            return
    except ssl.SSLCertVerificationError as error:
        verify_error = error.verify_message
        remedy = (
            "it was made for another federation: ca.crt of this folder and the server's must be of the same `fedvlm "
            "deploy init`"
        )
        if "expired" in verify_error or "not yet valid" in verify_error:
            remedy = "check the clocks, or renew it at the server: fedvlm deploy renew FOLDER"
        elif "match" in verify_error:
            remedy = "name the server in `fedvlm deploy init --host` as the sites reach it"
        raise FederationError(
            f"the certificate of the server at {address} is refused ({verify_error}); {remedy}"
        ) from error
    except ssl.SSLEOFError as error:  # as a proxy does whose server is down
        raise Unreachable(f"{address} closes the connection before it is established") from error
    except ssl.SSLError as error:
        raise FederationError(
            f"{address} does not answer with TLS ({error.reason}); is another program listening there? plain HTTP is "
            "refused"
        ) from error
    except OSError as error:
        raise Unreachable(f"no server answers at {address} ({error})") from error


def run_flwr(kit: ServerKit, *words: str) -> dict[str, Any]:
    """Run Flower's command line and return its JSON answer."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fedvlm.deploy.flower.server", "flwr", *words, "--format", "json"],
            cwd=flower_home(kit),  # Flower takes the name of a connection for a folder of that name
            env={**flower_environment(flower_home(kit)), TOKEN_FOLDER_VARIABLE: str(kit.folder.resolve())},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=CLI_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"success": False, "error-message": f"the server did not answer in {CLI_TIMEOUT_SECONDS:g} s"}
    output = done.stdout + done.stderr
    try:
        answer = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        answer = {"success": False, "error-message": output}
    return dict(answer)


def start_supernode(kit: SiteKit, bin: Path, env: Mapping[str, str]) -> Process:
    """Start a site's SuperNode; the programs it starts are those of `bin`."""
    command = [
        *(sys.executable, "-m", "fedvlm.deploy.flower.site"),
        *("--root-certificates", str(kit.folder / "ca.crt")),
        *("--auth-supernode-private-key", str(kit.folder / "key")),
        *("--superlink", kit.address),
        *("--host", "127.0.0.1"),
        *("--port", str(free_port())),
    ]
    full_environment = {
        **flower_environment(kit.folder / "flwr", bin),
        NODE_FILE_VARIABLE: str(kit.folder / ".node"),
        **env,
    }
    return Process("supernode", command, kit.folder / "supernode.log", full_environment)
