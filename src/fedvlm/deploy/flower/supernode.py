"""Flower's SuperNode that looks for messages often, comes back at once, and is behind a gate."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from fedvlm.deploy.flower import replace_attributes
from fedvlm.deploy.flower.gate import TOKEN_FOLDER_VARIABLE, AccessMiddleware, auth_token
from fedvlm.deploy.flower.kin import LinkedSubprocess, make_retrying
from fedvlm.engines.flower.api import QUIET_ENVIRONMENT
from fedvlm.errors import FederationError
from fedvlm.storage.files import write_file

POLL_SECONDS = 0.3  # seconds between looks, where Flower takes 3; one small request each
LOCAL_POLL_SECONDS = 0.05  # between looks for what the site's own process has answered, where Flower takes 0.5
SERVER_NAP_SECONDS = 1.0  # Flower's naps above it are between requests to the server
REPLY_TIMEOUT_SECONDS = 60.0  # seconds in which all of an answer of this machine has come in
CONNECTION_LOST = "its connection to the server has failed for good"
NODE_FILE_VARIABLE = "FEDVLM_NODE"  # the variable that names the file with the number of the last connection


class FastTime:
    """The module `time` with shorter naps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(POLL_SECONDS if seconds > SERVER_NAP_SECONDS else LOCAL_POLL_SECONDS)


def reconnecting_client(client: Any, node_file: Path) -> Any:
    """Closes what a killed process left open: for a minute it would keep its successor out."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest

    class Returning(client):  # type: ignore[misc, unused-ignore]
        def ActivateNode(self, request: Any) -> Any:
            if node_file.exists():
                with suppress(Exception):  # it was closed, or is of another server
                    self.DeactivateNode(DeactivateNodeRequest(node_id=int(node_file.read_text())))
            answer = super().ActivateNode(request)
            write_file(node_file, str(answer.node_id).encode())
            return answer

    return Returning


def retrying_heartbeat(sender: Any) -> Any:
    """A heartbeat that fails is tried again, whatever it fails by: without any, a node is off."""

    class Steady(sender):  # type: ignore[misc, unused-ignore]
        def __init__(self, beat: Callable[[], bool]) -> None:
            def beaten() -> bool:
                with suppress(Exception):
                    return beat()
                return False

            super().__init__(beaten)

    return Steady


def handle_ended_run(pull: Callable[..., Any]) -> Callable[..., Any]:
    """A run that ends while its message comes in, as any other message that does not come in whole.

    Flower forgets to take such a one back, and the site would wait an hour for the rest of it.
    """
    from flwr.supercore.run import RunNotRunningException

    def plain(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            try:
                return call(*args)
            except RunNotRunningException as error:
                raise FederationError("the run has ended meanwhile") from error

        return called

    def pulled(*, pull_object: Any, confirm_message_received: Any, **options: Any) -> Any:
        confirm = plain(confirm_message_received)
        return pull(pull_object=plain(pull_object), confirm_message_received=confirm, **options)

    return pulled


def answering_state(state: Any) -> Any:
    """A SuperNode asks for nothing else before it has an answer: a task that fails is one, too."""
    from flwr.common.constant import SubStatus
    from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR

    class Answering(state):  # type: ignore[misc, unused-ignore]
        def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
            finished = super().finish_task(task_id, sub_status, details)
            if finished and sub_status == SubStatus.FAILED:
                runs = [task.run_id for task in self.get_tasks(task_ids=[task_id])]
                self.get_messages_legacy(run_ids=runs, is_reply=False)  # as if it had been read
                self._store_error_replies(set(runs), CLIENT_APP_CRASHED_ERROR)
            return bool(finished)

    return Answering


def bounded_store(store: Any) -> Any:
    """Memory that is not asked for ever for what was announced: its sender may have failed."""

    class Bounded(store):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.asked: dict[str, float] = {}  # since when, for what is not there yet

        def get(self, object_id: str) -> Any:
            content = super().get(object_id)
            if content != b"":
                self.asked.pop(object_id, None)
            elif time.monotonic() - self.asked.setdefault(object_id, time.monotonic()) > REPLY_TIMEOUT_SECONDS:
                del self.asked[object_id]
                raise FederationError(f"the rest of an answer did not come in {REPLY_TIMEOUT_SECONDS:g} s")
            return content

    return Bounded


def with_access_control(make: Any) -> Any:
    """A SuperNode gives its messages to whoever asks on this machine; ours to its own kin only."""

    def made(**options: Any) -> Any:
        app = make(**options)
        app.add_middleware(AccessMiddleware, token=auth_token(Path(os.environ[TOKEN_FOLDER_VARIABLE])))
        return app

    return made


def main() -> None:
    os.environ.update(QUIET_ENVIRONMENT)
    internal: Any = import_module("flwr.supernode.start_client_internal")
    pull = handle_ended_run(internal._pull_and_store_message)
    replace_attributes(internal, time=FastTime(), subprocess=LinkedSubprocess(), _pull_and_store_message=pull)
    memory: Any = import_module("flwr.supernode.nodestate.nodestate_factory")
    replace_attributes(memory, InMemoryNodeState=answering_state(memory.InMemoryNodeState))
    objects: Any = import_module("flwr.supercore.object_store.object_store_factory")
    replace_attributes(objects, InMemoryObjectStore=bounded_store(objects.InMemoryObjectStore))
    connection: Any = import_module("flwr.supernode.fleet_http_connection")
    client = reconnecting_client(connection.FleetHttpClient, Path(os.environ[NODE_FILE_VARIABLE]))
    replace_attributes(
        connection,
        FleetHttpClient=client,
        make_simple_http_retry_invoker=make_retrying(connection.make_simple_http_retry_invoker),
        HeartbeatSender=retrying_heartbeat(connection.HeartbeatSender),
    )
    app: Any = import_module("flwr.supernode.main")
    replace_attributes(app, create_app=with_access_control(app.create_app))
    import_module("flwr.supernode.cli").flower_supernode()
    sys.stderr.write(f"{CONNECTION_LOST}\n")
    sys.stderr.flush()
    os._exit(1)  # else Flower's own threads keep this process alive, deaf


if __name__ == "__main__":
    main()
