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
from fedvlm.engines.flower.api import flower
from fedvlm.engines.flower.wire import (
    Parcel,
    from_bytes,
    from_records,
    state_of,
    to_bytes,
    to_records,
)
from fedvlm.errors import FederationError

DESK = "FEDVLM_DESK"  # the variable that names the socket of the site's process
SIZE = struct.Struct(">Q")
TRIES = 3  # of a call to the SuperNode, which is on this machine


def send_all(stream: socket.socket, parcels: Sequence[Parcel]) -> None:
    for parcel in parcels:
        data = to_bytes(parcel)
        stream.sendall(SIZE.pack(len(data)) + data)


def receive(stream: socket.socket) -> Parcel:
    return from_bytes(_exactly(stream, SIZE.unpack(_exactly(stream, SIZE.size))[0]))


def _exactly(stream: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = stream.recv(min(1 << 20, count - len(parts)))
        if not part:
            raise ConnectionError("the site's process closed the connection")
        parts += part
    return bytes(parts)


def ask(request: Parcel, state: Parcel) -> tuple[Parcel, Parcel]:
    """The site's answer and its new state."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(os.environ[DESK])
        send_all(stream, [request, state])
        return receive(stream), receive(stream)


def client_app() -> Any:
    app = flower()
    from flwr.clientapp import ClientApp

    client = ClientApp(mods=[flower_secure.mask])

    def hand_on(message: Any, context: Any) -> Any:
        try:
            return hand(message, context)
        except FederationError:
            raise
        except Exception as error:  # Flower tells the server what an exception says
            raise FederationError("the site did not answer; its own log says why") from error

    def hand(message: Any, context: Any) -> Any:
        state = state_of(context, "the state of this site")
        hidden = flower_secure.request(message.content)
        reply, after = ask(hidden or from_records(message.content, "the request"), state)
        context.state = to_records(after)
        return app.Message(flower_secure.records(reply, hidden is not None), reply_to=message)

    client.train()(hand_on)
    client.query()(hand_on)
    return client


def work(client: Any, app: Any) -> None:
    """One task: its message to the app, and the answer back; what came with the run stays unread.

    An error of the app is an answer, as in a process of its own.
    """
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode, SubStatus

    runtime: Any = import_module("flwr.supernode.runtime.run_clientapp")
    context, ended, why = None, SubStatus.FAILED, "it was not taken"
    with beating(client):
        try:
            message, context, _, _ = runtime.pull_task_input(client)
            try:
                reply = app(message, context)
            except Exception as error:
                said = f"{type(error)}:<'{error}'>"
                failed = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, said)
                reply = Message(failed, reply_to=message)
            runtime.push_message(client, reply, context)
            ended, why = SubStatus.COMPLETED, ""  # one that failed would be answered once more
        finally:
            runtime.push_task_output(client, context, ended, why)


@contextmanager
def beating(client: Any) -> Iterator[None]:
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


def refused(error: Exception) -> bool:
    """Whether a SuperNode has answered, and with a no; Flower ends the process by a signal then."""
    answer = getattr(error, "response", None)
    return answer is not None and answer.status_code < 500


def launch(app: Any, spec: Any) -> None:
    """A task that the SuperNode gave away, by the token that is for it alone."""
    from flwr.supercore.interceptors import (
        RuntimeTokenHttpInterceptor,
        RuntimeVersionHttpInterceptor,
    )
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient

    again = make_simple_http_retry_invoker()
    again.max_tries = TRIES  # else this process outlives its SuperNode, and asks for ever
    again.should_giveup = refused
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
        work(client, app)
    finally:
        client.close()
