"""Start a server's and a site's processes quietly, and always stop them again."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic, sleep

from fedvlm.deploy.flower.access import FORBIDDEN
from fedvlm.deploy.flower.network import Unreachable, check_server, open_connection, tls_context
from fedvlm.deploy.flower.server import DATABASE_FILE, end_with_parent
from fedvlm.deploy.kits import ServerKit, listen_address, local_address
from fedvlm.engines.flower import QUIET_ENVIRONMENT
from fedvlm.errors import FederationError
from fedvlm.storage.files import open_for_append

PORT_VARIABLE_PREFIX = "FLWR_INTERNAL_GRPC_"
START_TIMEOUT_SECONDS = 60.0  # seconds a SuperLink has to come up


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment of processes that import Flower: a folder of its own, no telemetry."""
    # With these Flower opens two more ports, and nobody watches them.
    inherited = {key: setting for key, setting in os.environ.items() if not key.startswith(PORT_VARIABLE_PREFIX)}
    return {**inherited, **QUIET_ENVIRONMENT, "FLWR_HOME": str(home.resolve())}


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
                preexec_fn=end_with_parent,
            )

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def tail(self, lines: int = 12) -> str:
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


def start_superlink(kit: ServerKit) -> Process:
    """Start the server's SuperLink and wait until it answers; sites can connect from then on."""
    host, port = listen_address(kit)
    program = [sys.executable, "-m", "fedvlm.deploy.flower.server"]
    command = [*program, "superlink", str(kit.folder.resolve()), host, str(port)]
    _check_port_free(host, port)
    env = flower_environment(kit.folder / "flwr")
    link = Process("superlink", command, kit.folder / "superlink.log", env)
    try:
        _wait_until_up(kit, link)
    except BaseException:
        link.stop()
        raise
    return link


def _check_port_free(host: str, port: int) -> None:
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise FederationError(
            f"the server cannot listen on port {port} ({os.strerror(error.errno or 0)}); is another server or program "
            "running there? stop it, or change the port in server.toml"
        ) from error


def is_server_up(kit: ServerKit) -> bool:
    """Return whether the server of this folder is up, on this machine."""
    try:
        check_server(local_address(kit), kit.folder / "ca.crt", is_local=True)
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
    code = link.child.poll() or 0
    how = f", by {signal.Signals(-code).name}" if code < 0 else ""
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
    context = tls_context(kit.folder / "ca.crt")
    context.check_hostname = False  # this machine may have other names
    with closing(open_connection(local_address(kit), context)) as call:
        call.request("POST", "/v1/control/list-runs")
        status = call.getresponse().status
    if status != FORBIDDEN:
        raise FederationError(
            f"the SuperLink answers outsiders ({status} instead of {FORBIDDEN}), so it was stopped; this version of "
            "Flower was not tested: pip install 'fedvlm[flower]' again"
        )
