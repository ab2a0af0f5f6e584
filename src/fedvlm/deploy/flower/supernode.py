"""Flower's SuperNode that looks for messages often, comes back at once, and is behind a gate."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from fedvlm.deploy.flower import put
from fedvlm.deploy.flower.gate import PASS, Gate, word
from fedvlm.deploy.flower.kin import Kin, patient
from fedvlm.engines.flower.api import QUIET
from fedvlm.errors import FederationError
from fedvlm.storage.files import write

LOOK = 0.3  # seconds between looks, where Flower takes 3; one small request each
NEAR = 0.05  # between looks for what the site's own process has answered, where Flower takes 0.5
LONG = 1.0  # Flower's naps above it are between requests to the server
REST = 60.0  # seconds in which all of an answer of this machine has come in
LOST = "its connection to the server has failed for good"
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


def steady(sender: Any) -> Any:
    """A heartbeat that fails is tried again, whatever it fails by: without any, a node is off."""

    class Steady(sender):  # type: ignore[misc, unused-ignore]
        def __init__(self, beat: Callable[[], bool]) -> None:
            def beaten() -> bool:
                with suppress(Exception):
                    return beat()
                return False

            super().__init__(beaten)

    return Steady


def settled(pull: Callable[..., Any]) -> Callable[..., Any]:
    """A run that ends while its message comes in, as any other message that does not come in whole.

    Flower forgets to take such a one back, and the site would wait an hour for the rest of it.
    """
    from flwr.supercore.run import RunNotRunningException

    def plain(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            try:
                return call(*given)
            except RunNotRunningException as error:
                raise FederationError("the run has ended meanwhile") from error

        return called

    def pulled(*, pull_object: Any, confirm_message_received: Any, **given: Any) -> Any:
        confirm = plain(confirm_message_received)
        return pull(pull_object=plain(pull_object), confirm_message_received=confirm, **given)

    return pulled


def answering(state: Any) -> Any:
    """A SuperNode asks for nothing else before it has an answer: a task that fails is one, too."""
    from flwr.common.constant import SubStatus
    from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR

    class Answering(state):  # type: ignore[misc, unused-ignore]
        def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
            finished = super().finish_task(task_id, sub_status, details)
            if finished and sub_status == SubStatus.FAILED:
                runs = [one.run_id for one in self.get_tasks(task_ids=[task_id])]
                self.get_messages_legacy(run_ids=runs, is_reply=False)  # as if it had been read
                self._store_error_replies(set(runs), CLIENT_APP_CRASHED_ERROR)
            return bool(finished)

    return Answering


def bounded(store: Any) -> Any:
    """Memory that is not asked for ever for what was announced: its sender may have failed."""

    class Bounded(store):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.asked: dict[str, float] = {}  # since when, for what is not there yet

        def get(self, object_id: str) -> Any:
            content = super().get(object_id)
            if content != b"":
                self.asked.pop(object_id, None)
            elif time.monotonic() - self.asked.setdefault(object_id, time.monotonic()) > REST:
                del self.asked[object_id]
                raise FederationError(f"the rest of an answer did not come in {REST:g} s")
            return content

    return Bounded


def behind_a_gate(make: Any) -> Any:
    """A SuperNode gives its messages to whoever asks on this machine; ours to its own kin only."""

    def made(**given: Any) -> Any:
        app = make(**given)
        app.add_middleware(Gate, word=word(Path(os.environ[PASS])))
        return app

    return made


def main() -> None:
    os.environ.update(QUIET)
    internal: Any = import_module("flwr.supernode.start_client_internal")
    pull = settled(internal._pull_and_store_message)
    put(internal, time=Time(), subprocess=Kin(), _pull_and_store_message=pull)
    memory: Any = import_module("flwr.supernode.nodestate.nodestate_factory")
    put(memory, InMemoryNodeState=answering(memory.InMemoryNodeState))
    objects: Any = import_module("flwr.supercore.object_store.object_store_factory")
    put(objects, InMemoryObjectStore=bounded(objects.InMemoryObjectStore))
    connection: Any = import_module("flwr.supernode.fleet_http_connection")
    client = returning(connection.FleetHttpClient, Path(os.environ[NOTE]))
    put(
        connection,
        FleetHttpClient=client,
        make_simple_http_retry_invoker=patient(connection.make_simple_http_retry_invoker),
        HeartbeatSender=steady(connection.HeartbeatSender),
    )
    app: Any = import_module("flwr.supernode.main")
    put(app, create_app=behind_a_gate(app.create_app))
    import_module("flwr.supernode.cli").flower_supernode()
    sys.stderr.write(f"{LOST}\n")
    sys.stderr.flush()
    os._exit(1)  # else Flower's own threads keep this process alive, deaf


if __name__ == "__main__":
    main()
