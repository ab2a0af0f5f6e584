"""The ClientApp of a site: hands each message to the site's own process and its answer back.

Flower starts a new process for every message; here the site's SuperExec, which lives as long as the
site, answers each by itself. It is a module of the installed package and not the code that came
with the run: a server can ask, but brings no program. The process imports no torch; the site's
process has it, the rows and the `local` tensors in memory.
"""

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from fedvlm.engines.flower import secure as flower_secure
from fedvlm.engines.flower.api import import_flower
from fedvlm.engines.flower.wire import (
    Message,
    from_bytes,
    from_records,
    read_context_state,
    to_bytes,
    to_records,
)
from fedvlm.errors import FederationError

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
    """The site's answer and its new state."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(os.environ[SITE_SOCKET_VARIABLE])
        send_messages(stream, [request, state])
        return receive_message(stream), receive_message(stream)


def create_client_app() -> Any:
    app = import_flower()
    from flwr.clientapp import ClientApp

    client = ClientApp(mods=[flower_secure.mask_upload])

    def handle(message: Any, context: Any) -> Any:
        try:
            return forward(message, context)
        except FederationError:
            raise
        except Exception as error:  # Flower tells the server what an exception says
            raise FederationError("the site did not answer; its own log says why") from error

    def forward(message: Any, context: Any) -> Any:
        state = read_context_state(context, "the state of this site")
        hidden = flower_secure.unwrap_request(message.content)
        reply, after = query_site(hidden or from_records(message.content, "the request"), state)
        context.state = to_records(after)
        return app.Message(flower_secure.wrap_reply(reply, hidden is not None), reply_to=message)

    client.train()(handle)
    client.query()(handle)
    return client


def run_task(client: Any, app: Any) -> None:
    """One task: its message to the app, and the answer back; what came with the run stays unread.

    An error of the app is an answer, as in a process of its own.
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
    """Tells the SuperNode that the task is in hand; one that is no more needs no heartbeat."""
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
    """Whether a SuperNode has answered, and with a no; Flower ends the process by a signal then."""
    answer = getattr(error, "response", None)
    return answer is not None and answer.status_code < 500


def run_assigned_task(app: Any, spec: Any) -> None:
    """A task that the SuperNode gave away, by the token that is for it alone."""
    from flwr.supercore.interceptors import (
        RuntimeTokenHttpInterceptor,
        RuntimeVersionHttpInterceptor,
    )
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
