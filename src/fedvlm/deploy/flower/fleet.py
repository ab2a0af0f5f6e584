"""Connect a site's own process to the server: Flower's fleet routes, protobuf messages and signatures, over HTTPS.

A site calls the server and opens no port. Nothing that comes with a run is unpacked or imported: a request is words
and arrays, and the installed fedvlm answers it.
"""

from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedvlm.deploy.flower.network import Unreachable, check_server, clock_skew, describe_skew, make_http_client
from fedvlm.deploy.identity.keys import SIGNATURE_SCHEME, Signer
from fedvlm.engines.flower import import_flower
from fedvlm.engines.flower.messages import Message, from_records, read_context_state, to_records
from fedvlm.errors import FederationError
from fedvlm.storage.files import write_file

HEARTBEAT_SECONDS = 10.0  # between heartbeats
HEARTBEAT_INTERVAL_SECONDS = 30.0  # that a server is told: after two of them without one, the site is offline
MAX_RETRY_SECONDS = 3.0  # at most until a server that is away is called again
MIN_POLL_SECONDS = 0.3  # between requests for messages to a server that answers at once that there is none
OBJECT_TIMEOUT_SECONDS = 60.0  # in which all parts of a request are there
MAX_CONTEXTS = 8  # runs whose state is kept in memory; all else is in the site's folder
UNAUTHORIZED = 401
APP_ERROR_CODE = 2  # Flower's number for an error of a client's app
ANSWER_FAILED = "the site did not reply; see the site's log"
Answer = Callable[[Message, Message], tuple[Message, Message]]  # request and state to reply and new state


class NotAdmitted(FederationError):
    """The server does not know this site's key, or does not accept its signature."""

    def __init__(self, text: str, clock: str = "") -> None:
        super().__init__(text)
        self.clock = clock  # what is wrong with the clock, which signatures depend on


class CallRefused(FederationError):
    """The server refuses a call for good, such as one of a run that has ended."""


class Stopped(Exception):
    """Somebody stops the site while it waits for the server."""


class FleetClient:
    """Call the fleet routes of a server as the holder of a site's key."""

    def __init__(self, address: str, folder: Path, stop: Event) -> None:
        import_flower()
        self.address, self.stop, self.node_file, self.ca = address, stop, folder / ".node", folder / "ca.crt"
        self.key: Any = Signer(folder / "key").key
        self.public_key: bytes = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.http = make_http_client(address, folder / "ca.crt")
        self.node: dict[str, int] = {}  # the number of this connection
        self.beating = Thread(target=self._send_heartbeats, daemon=True)

    def call(self, route: str, request: Any, tries: float = float("inf")) -> bytes:
        """Return the answer's bytes; broken connections and a server in trouble are tried again until it is stopped."""
        content, delay = request.SerializeToString(), 0.1
        while True:
            tries -= 1
            try:
                response = self.http.post(
                    f"https://{self.address}/v1/fleet/{route}", content=content, headers=self._headers()
                )
            except httpx.TransportError as error:
                problem = str(error)
                is_refused = "certificate verify failed" in problem
                if is_refused or isinstance(error, httpx.ProxyError):
                    with suppress(Unreachable):
                        check_server(self.address, self.ca)  # it says what is wrong, and which proxy it is
                if is_refused:
                    raise FederationError(f"the certificate of the server is refused: {problem}") from error
            else:
                if response.status_code == httpx.codes.OK:
                    return bytes(response.content)
                problem = f"HTTP status {response.status_code}"
                if response.status_code == UNAUTHORIZED:
                    skew = clock_skew(response.headers.get("date"))
                    raise NotAdmitted(f"{route}: {problem}", describe_skew(skew))
                if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                    raise CallRefused(f"{route}: {problem} {response.text[:300]}")
            if tries < 1:
                raise CallRefused(f"{route}: {problem}")
            if self.stop.wait(delay):
                raise Stopped
            delay = min(2 * delay, MAX_RETRY_SECONDS)

    def _headers(self) -> dict[str, str]:
        """Return the headers of a call, with a signature of the time: Flower's proof of a node's key."""
        time = datetime.now(UTC).isoformat()
        signature = self.key.sign(time.encode(), SIGNATURE_SCHEME)
        return {
            "content-type": "application/protobuf",
            "accept": "application/protobuf",
            "flwr-public-key": b64encode(self.public_key).decode(),
            "flwr-timestamp": time,
            "flwr-signature": b64encode(signature).decode(),
        }

    def connect(self) -> None:
        """Become a node of the server; the connection of a killed process is closed first."""
        from flwr.proto import fleet_pb2

        if self.node_file.exists():
            with suppress(FederationError, ValueError):  # it was closed, or is of another server
                old = int(self.node_file.read_text())
                self.call("deactivate-node", fleet_pb2.DeactivateNodeRequest(node_id=old))
        request = fleet_pb2.ActivateNodeRequest(
            public_key=self.public_key, heartbeat_interval=HEARTBEAT_INTERVAL_SECONDS
        )
        answer = fleet_pb2.ActivateNodeResponse.FromString(self.call("activate-node", request))
        self.node = {"node_id": answer.node_id}
        write_file(self.node_file, str(answer.node_id).encode())
        if not self.beating.is_alive():
            self.beating.start()

    def disconnect(self) -> None:
        """Leave the server, if it answers at once."""
        from flwr.proto import fleet_pb2

        self.stop.set()
        with suppress(Exception):
            self.call("deactivate-node", fleet_pb2.DeactivateNodeRequest(**self.node), tries=1)
        self.http.close()

    def _send_heartbeats(self) -> None:
        from flwr.proto import heartbeat_pb2

        while not self.stop.wait(HEARTBEAT_SECONDS):
            with suppress(Exception):  # the next one may arrive; a refused site is told by its other calls
                request = heartbeat_pb2.SendNodeHeartbeatRequest(
                    node=self.node, heartbeat_interval=HEARTBEAT_INTERVAL_SECONDS
                )
                self.call("send-node-heartbeat", request, tries=1)

    def receive(self) -> Any:
        """Return the next request as Flower's message, or None if there is none yet."""
        from flwr.proto import fleet_pb2, message_pb2
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        answer = self.call("pull-messages", fleet_pb2.PullMessagesRequest(node=self.node))
        pulled = fleet_pb2.PullMessagesResponse.FromString(answer)
        if not pulled.messages_list:
            return None
        run, id = pulled.messages_list[0].metadata.run_id, pulled.messages_list[0].metadata.message_id
        parts = {name: self._pull_object(run, name) for name in object_ids(pulled.message_object_trees[0])}
        confirmation = message_pb2.ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=id)
        self.call("confirm-message-received", confirmation)
        message: Any = inflate_object_from_contents(id, parts)
        message.metadata.__dict__["_message_id"] = id
        return message

    def _pull_object(self, run: int, id: str) -> bytes:
        from flwr.proto import message_pb2

        request, end = message_pb2.PullObjectRequest(node=self.node, run_id=run, object_id=id), None
        while True:
            answer = message_pb2.PullObjectResponse.FromString(self.call("pull-object", request))
            if answer.object_available:
                return bytes(answer.object_content)
            end = end or monotonic() + OBJECT_TIMEOUT_SECONDS
            if not answer.object_found or monotonic() > end:
                raise CallRefused("a part of a request is missing at the server")
            if self.stop.wait(0.1):
                raise Stopped

    def send(self, reply: Any) -> None:
        """Send a reply; a server that knows some of its parts is sent the others only."""
        from flwr.common.serde import message_to_proto
        from flwr.proto import fleet_pb2, message_pb2

        parts, tree = deflate_message(reply)
        header = message_to_proto(reply)
        if reply.has_content():
            header.content.CopyFrom(type(header.content)())  # it is there, and travels in parts
        request = fleet_pb2.PushMessagesRequest(
            node=self.node, messages_list=[header], message_object_trees=[tree], clientapp_runtime_list=[0.0]
        )
        pushed = fleet_pb2.PushMessagesResponse.FromString(self.call("push-messages", request))
        for id in pushed.objects_to_push:
            about = {"node": self.node, "run_id": reply.metadata.run_id, "session_id": pushed.session_id}
            part = message_pb2.PushObjectRequest(object_id=id, object_content=parts[id], **about)
            self.call("push-object", part)


def object_ids(tree: Any) -> set[str]:
    return {tree.object_id}.union(*(object_ids(child) for child in tree.children))


def deflate_message(message: Any) -> tuple[dict[str, bytes], Any]:
    """Name a message by its content, as Flower does; return its parts as bytes by id, and the tree of the ids."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

    message.metadata.__dict__["_message_id"] = message.object_id
    return {id: part.deflate() for id, part in get_all_nested_objects(message).items()}, get_object_tree(message)


def serve_requests(client: FleetClient, answer: Answer, log_text: Callable[[str], None]) -> None:
    """Answer requests until the client is stopped; an error costs one request, never the site."""
    contexts: dict[int, Any] = {}
    while not client.stop.is_set():
        started = monotonic()
        try:
            message = client.receive()
            if message is not None:
                client.send(make_reply(message, contexts, answer, log_text))
            elif (rest := MIN_POLL_SECONDS - (monotonic() - started)) > 0:
                client.stop.wait(rest)
        except Stopped:
            return
        except NotAdmitted:
            client.connect()  # the server may have a new database; it also says if the key has ended
        except CallRefused as error:
            log_text(f"a request was not answered: {error}")
        except FederationError:
            raise
        except Exception as error:  # such as bytes that are no message
            log_text(f"a request was not answered ({type(error).__name__}: {error})")
            client.stop.wait(MIN_POLL_SECONDS)


def make_reply(message: Any, contexts: dict[int, Any], answer: Answer, log_text: Callable[[str], None]) -> Any:
    """Return the site's reply as Flower's message; of an error of its own the server learns nothing."""
    app, run, node = import_flower(), message.metadata.run_id, message.metadata.dst_node_id
    contexts.setdefault(run, app.Context(run, node, {}, app.RecordDict(), {}))
    while len(contexts) > MAX_CONTEXTS:
        contexts.pop(next(iter(contexts)))

    context = contexts[run]
    try:
        state = read_context_state(context, "the state of this site")
        request = from_records(message.content, "the request")
    except FederationError as error:
        return app.Message(app.Error(APP_ERROR_CODE, str(error)), reply_to=message)
    try:
        reply, after = answer(request, state)
        context.state = to_records(after)
        return app.Message(to_records(reply), reply_to=message)
    except Exception as error:
        with suppress(Exception):  # also if nobody reads what the site says
            log_text(f"a request was not answered ({type(error).__name__}: {error})")
        return app.Message(app.Error(APP_ERROR_CODE, ANSWER_FAILED), reply_to=message)
