"""Waiting for a run of the server: its result, or why there is none."""

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from fedvlm.deploy.flower.processes import LINK, answers, flwr
from fedvlm.deploy.kits import ServerKit
from fedvlm.deploy.server import FAILED
from fedvlm.errors import FederationError

LOOK = 20.0  # seconds between questions to Flower whether a run still runs
TRIES = 3  # of such a question
GOING = ("running", "starting", "pending")  # Flower's words for a run that has not ended
PENDING = 60.0  # seconds a server takes at most to begin one


def follow(kit: ServerKit, id: str, done: Callable[[], bool], hear: Callable[[], None]) -> None:
    """Waits for the result; the server's process says why if there is none."""
    begin = looked = monotonic()
    log = kit.folder / "superlink.log"
    while not done():
        hear()
        if (kit.folder / FAILED).exists():
            raise FederationError((kit.folder / FAILED).read_text())
        if monotonic() - looked > LOOK:
            status = _status(kit, id)
            looked = monotonic()
            if "pending" in status and looked - begin > PENDING:
                flwr(kit, "stop", id, LINK)
                raise FederationError(
                    f"the server has not begun the run in {PENDING:g} s; stop it and start it "
                    f"again, and see {log}"
                )
            if not any(word in status for word in GOING):
                sleep(1.0)
                if not done() and not (kit.folder / FAILED).exists():
                    raise FederationError(
                        f"the run ended without a result ({status}); run the same command again "
                        f"to go on, and see {log}"
                    )
        sleep(0.2)
    hear()


def _status(kit: ServerKit, id: str) -> str:
    """What Flower says of a run; a server that is slow for once is not taken for an end."""
    for _ in range(TRIES):
        listed: Any = flwr(kit, "list", LINK, "--run-id", id)
        if "runs" in listed:
            return str(listed["runs"][0].get("status")) if listed["runs"] else "unknown"
        if not answers(kit):
            raise FederationError(
                f"the server at {kit.address} does not answer any more; start it: fedvlm deploy "
                f"server {kit.folder}, and run the same command again to go on"
            )
    why = str(listed.get("error-message", listed)).strip()
    raise FederationError(f"the server does not say how the run is: {why}")
