"""Waiting for a run of the server: its result, or why there is none."""

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from fedvlm.deploy.flower.processes import CONNECTION_NAME, is_server_up, run_flwr
from fedvlm.deploy.kits import ServerKit
from fedvlm.deploy.server import ERROR_FILE
from fedvlm.errors import FederationError

STATUS_INTERVAL_SECONDS = 20.0  # seconds between questions to Flower whether a run still runs
MAX_STATUS_TRIES = 3  # of such a question
ACTIVE_STATUSES = ("running", "starting", "pending")  # Flower's words for a run that has not ended
MAX_PENDING_SECONDS = 60.0  # seconds a server takes at most to begin one


def wait_for_run(kit: ServerKit, id: str, done: Callable[[], bool], on_poll: Callable[[], None]) -> None:
    """Waits for the result; the server's process says why if there is none."""
    started = looked = monotonic()
    log = kit.folder / "superlink.log"
    while not done():
        on_poll()
        if (kit.folder / ERROR_FILE).exists():
            raise FederationError((kit.folder / ERROR_FILE).read_text())
        if monotonic() - looked > STATUS_INTERVAL_SECONDS:
            status = _run_status(kit, id)
            looked = monotonic()
            if "pending" in status and looked - started > MAX_PENDING_SECONDS:
                run_flwr(kit, "stop", id, CONNECTION_NAME)
                raise FederationError(
                    f"the server has not begun the run in {MAX_PENDING_SECONDS:g} s; stop it and start it "
                    f"again, and see {log}"
                )
            if not any(word in status for word in ACTIVE_STATUSES):
                sleep(1.0)
                if not done() and not (kit.folder / ERROR_FILE).exists():
                    raise FederationError(
                        f"the run ended without a result ({status}); run the same command again to go on, and see {log}"
                    )
        sleep(0.2)
    on_poll()


def _run_status(kit: ServerKit, id: str) -> str:
    """What Flower says of a run; a server that is slow for once is not taken for an end."""
    for _ in range(MAX_STATUS_TRIES):
        listed: Any = run_flwr(kit, "list", CONNECTION_NAME, "--run-id", id)
        if "runs" in listed:
            return str(listed["runs"][0].get("status")) if listed["runs"] else "unknown"
        if not is_server_up(kit):
            raise FederationError(
                f"the server at {kit.address} does not answer any more; start it: fedvlm deploy "
                f"server {kit.folder}, and run the same command again to go on"
            )
    reason = str(listed.get("error-message", listed)).strip()
    raise FederationError(f"the server does not say how the run is: {reason}")
