"""Flower's SuperNode that looks for messages often, comes back at once, and is behind a gate."""

import os
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from fedvlm.deploy.flower import put
from fedvlm.deploy.flower.gate import PASS, Gate, word
from fedvlm.engines.flower.api import QUIET
from fedvlm.storage.files import write

LOOK = 0.3  # seconds between looks, where Flower takes 3; one small request each
NEAR = 0.05  # between looks for what the site's own process has answered, where Flower takes 0.5
LONG = 1.0  # Flower's naps above it are between requests to the server
NOTE = "FEDVLM_NODE"  # the variable that names the file with the number of the last connection


class Time:
    """The module `time` with shorter naps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(LOOK if seconds > LONG else NEAR)


def returning(client: Any, note: Path) -> Any:
    """Closes what a killed process left open: for a minute it would keep its successor out."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest

    class Returning(client):  # type: ignore[misc, unused-ignore]
        def ActivateNode(self, request: Any) -> Any:
            if note.exists():
                with suppress(Exception):  # it was closed, or is of another server
                    self.DeactivateNode(DeactivateNodeRequest(node_id=int(note.read_text())))
            answer = super().ActivateNode(request)
            write(note, str(answer.node_id).encode())
            return answer

    return Returning


def behind_a_gate(make: Any) -> Any:
    """A SuperNode gives its messages to whoever asks on this machine; ours to its own kin only."""

    def made(**given: Any) -> Any:
        app = make(**given)
        app.add_middleware(Gate, word=word(Path(os.environ[PASS])))
        return app

    return made


def main() -> None:
    os.environ.update(QUIET)
    put(import_module("flwr.supernode.start_client_internal"), time=Time())
    connection: Any = import_module("flwr.supernode.fleet_http_connection")
    client = returning(connection.FleetHttpClient, Path(os.environ[NOTE]))
    put(connection, FleetHttpClient=client)
    app: Any = import_module("flwr.supernode.main")
    put(app, create_app=behind_a_gate(app.create_app))
    import_module("flwr.supernode.cli").flower_supernode()


if __name__ == "__main__":
    main()
