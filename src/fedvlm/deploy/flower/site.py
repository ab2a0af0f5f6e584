"""Run Flower's processes at a site: a SuperNode that polls often and reconnects at once, and the ClientApp.

Flower starts a new process for every message; here the site's SuperExec, which lives as long as the site, hands each
message to the site's own process. It runs the installed package and never code that came with the run: a server can
ask, but brings no program. These processes import no torch; the site's process holds samples and `local` tensors.
"""

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from fedvlm.deploy.flower import LinkedSubprocess, make_retrying, replace_attributes, start_superexec
from fedvlm.deploy.flower.access import TOKEN_FOLDER_VARIABLE, AccessMiddleware, attach_token, auth_token
from fedvlm.engines.flower import QUIET_ENVIRONMENT, import_flower
from fedvlm.engines.flower.messages import Message, from_bytes, from_records, read_context_state, to_bytes, to_records
from fedvlm.errors import FederationError
from fedvlm.storage.files import write_file

POLL_SECONDS = 0.3  # seconds between looks, where Flower takes 3; one small request each
LOCAL_POLL_SECONDS = 0.05  # between looks for what the site's own process has answered, where Flower takes 0.5
SERVER_NAP_SECONDS = 1.0  # Flower's naps above it are between requests to the server
REPLY_TIMEOUT_SECONDS = 60.0  # seconds in which all of an answer of this machine has come in
CONNECTION_LOST = "its connection to the server has failed permanently"
NODE_FILE_VARIABLE = "FEDVLM_NODE"  # the variable that names the file with the number of the last connection


class FastTime:
    """Stand in for the module `time`, with shorter naps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(POLL_SECONDS if seconds > SERVER_NAP_SECONDS else LOCAL_POLL_SECONDS)


def reconnecting_client(client: Any, node_file: Path) -> Any:
    """Close the connection of a killed process first: it would keep its successor out for a minute."""
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
    """Retry a heartbeat whatever its error is: without heartbeats, a node is offline."""

    class Steady(sender):  # type: ignore[misc, unused-ignore]
        def __init__(self, beat: Callable[[], bool]) -> None:
            def beaten() -> bool:
                with suppress(Exception):
                    return beat()
                return False

            super().__init__(beaten)

    return Steady


def handle_ended_run(pull: Callable[..., Any]) -> Callable[..., Any]:
    """Treat a run that ends while its message comes in like any incomplete message.

    Flower does not take such a message back, and the site would wait an hour for the rest of it.
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
    """Answer a failed task too: a SuperNode requests nothing else before it has an answer."""
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
    """Stop waiting for announced objects after a while: their sender may have failed."""

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
                raise FederationError(f"the rest of a reply did not arrive within {REPLY_TIMEOUT_SECONDS:g} s")
            return content

    return Bounded


def with_access_control(make: Any) -> Any:
    """Give a SuperNode's messages to our own processes only; Flower gives them to anyone on this machine."""

    def made(**options: Any) -> Any:
        app = make(**options)
        app.add_middleware(AccessMiddleware, token=auth_token(Path(os.environ[TOKEN_FOLDER_VARIABLE])))
        return app

    return made


def run_supernode() -> None:
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


SITE_SOCKET_VARIABLE = "FEDVLM_DESK"  # the variable that names the socket of the site's process
LENGTH_PREFIX = struct.Struct(">Q")
MAX_TRIES = 3  # of a call to the SuperNode, which is on this machine


def send_messages(stream: socket.socket, parcels: Sequence[Message]) -> None:
    for message in parcels:
        data = to_bytes(message)
        stream.sendall(LENGTH_PREFIX.pack(len(data)) + data)


def receive_message(stream: socket.socket) -> Message:
    return from_bytes(_receive_bytes(stream, LENGTH_PREFIX.unpack(_receive_bytes(stream, LENGTH_PREFIX.size))[0]))


def _receive_bytes(stream: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = stream.recv(min(1 << 20, count - len(parts)))
        if not part:
            raise ConnectionError("the site's process closed the connection")
        parts += part
    return bytes(parts)


def query_site(request: Message, state: Message) -> tuple[Message, Message]:
    """Send a request to the site's process; return its reply and its new state."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(os.environ[SITE_SOCKET_VARIABLE])
        send_messages(stream, [request, state])
        return receive_message(stream), receive_message(stream)


def create_client_app() -> Any:
    app = import_flower()
    from flwr.clientapp import ClientApp

    client = ClientApp()

    def handle(message: Any, context: Any) -> Any:
        try:
            return forward(message, context)
        except FederationError:
            raise
        except Exception as error:  # Flower tells the server what an exception says
            raise FederationError("the site did not reply; see the site's log") from error

    def forward(message: Any, context: Any) -> Any:
        state = read_context_state(context, "the state of this site")
        reply, after = query_site(from_records(message.content, "the request"), state)
        context.state = to_records(after)
        return app.Message(to_records(reply), reply_to=message)

    client.train()(handle)
    client.query()(handle)
    return client


def run_task(client: Any, app: Any) -> None:
    """Run one task: pass its message to the app and send the reply back; code that came with the run is ignored.

    An error of the app is a reply, as in a process of its own.
    """
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode, SubStatus

    runtime: Any = import_module("flwr.supernode.runtime.run_clientapp")
    context, ended, details = None, SubStatus.FAILED, "it was not taken"
    with task_heartbeat(client):
        try:
            message, context, _, _ = runtime.pull_task_input(client)
            try:
                reply = app(message, context)
            except Exception as error:
                error_text = f"{type(error)}:<'{error}'>"
                failed = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, error_text)
                reply = Message(failed, reply_to=message)
            runtime.push_message(client, reply, context)
            ended, details = SubStatus.COMPLETED, ""  # one that failed would be answered once more
        finally:
            runtime.push_task_output(client, context, ended, details)


@contextmanager
def task_heartbeat(client: Any) -> Iterator[None]:
    """Send heartbeats of the task in hand; a task that no longer exists needs none."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest
    from flwr.supercore.heartbeat import HeartbeatSender

    def beat() -> bool:
        with suppress(httpx.HTTPError):
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        return True

    sender = HeartbeatSender(beat)
    sender.start()
    try:
        yield
    finally:
        sender.stop()


def is_refused(error: Exception) -> bool:
    """Return whether a SuperNode has answered with a refusal; Flower would end the process by a signal."""
    answer = getattr(error, "response", None)
    return answer is not None and answer.status_code < 500


def run_assigned_task(app: Any, spec: Any) -> None:
    """Run a task that the SuperNode assigned, with the token for this task."""
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient

    again = make_simple_http_retry_invoker()
    again.max_tries = MAX_TRIES  # else this process outlives its SuperNode, and asks for ever
    again.should_giveup = is_refused
    client = RuntimeHttpClient.from_server_address(
        server_address=spec.runtime_api_address,
        insecure=spec.insecure,
        root_certificates=None,  # it is on this machine, and behind our gate
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(spec.token),
        ],
        retry_invoker=again,
    )
    try:
        run_task(client, app)
    finally:
        client.close()


def run_superexec() -> None:
    """Run `flower-superexec` as the SuperNode calls it: do its tasks in this process, one after the other."""
    import_flower()
    attach_token()
    from flwr.supercore.superexec.executor import LaunchResult

    app = create_client_app()

    def run_in_process(self: Any, spec: Any) -> Any:
        try:
            run_assigned_task(app, spec)
        except Exception as error:  # the next task may succeed
            return LaunchResult.failed(f"{type(error).__name__}: {error}")
        return LaunchResult.accepted()

    start_superexec("CLIENT_APP", run_in_process)


if __name__ == "__main__":
    run_supernode()
