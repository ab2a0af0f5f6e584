"""Send tasks to clients as Flower messages: the server's side.

A client replies with its upload, its scores, and the version number of its `local` tensors, which stay with it.
"""

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from secrets import token_hex
from typing import Any

from fedvlm.core import Tensors
from fedvlm.engines import flower as api
from fedvlm.engines.client import ClientReply, Local, RemoteState, RoundReplies, Task, World, as_tensors
from fedvlm.engines.flower import client, import_flower, messages
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.tensors import max_relative_difference

TTL_MARGIN_SECONDS = 10.0  # seconds after the deadline until Flower forgets a message
NODE_UNAVAILABLE = 5  # Flower's code of the error by which it answers for a client that is offline
CLIENT_STATE = "the state of this client"
MESSAGE_TYPES = {"open": "query", "evaluate": "query"}  # Flower's words for ours; all others are "train"


class FlowerEngine:
    """Send tasks through a grid; clients that do not reply in time are left out, down to the quorum."""

    def __init__(
        self,
        grid: Any,
        nodes: Mapping[str, int],
        training: str,
        quorum: float = 1.0,  # share of the clients asked that must answer
        deadline: float | None = None,  # seconds; None waits for ever
    ) -> None:
        self.grid = grid
        self.nodes = dict(nodes)  # by client id
        self.training = training
        self.quorum = quorum
        self.deadline = deadline
        self.rows: dict[str, int] = {}  # that each client trains on
        self.absent: dict[str, str] = {}  # why a client has no node, if it is known
        self.missing: dict[str, str] = {}  # who did not answer the last time, and why

    def round(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        return self._run_tasks("round", number, tasks)

    def adapt(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        return self._run_tasks("adapt", number, tasks)

    def close(self) -> None:
        pass

    def version(self, id: str, local: Local) -> int:
        assert isinstance(local, RemoteState), f"the local tensors of {id} are with it, not here"
        return local.version

    def local(self, id: str, version: int) -> Local:
        """Return what stands for a client's local tensors at the server."""
        return RemoteState(version)

    def seal(self, message: messages.Message) -> messages.Message:
        return messages.seal(message)

    def unseal(self, message: messages.Message, id: str, context: str) -> messages.Message:
        return messages.unseal(message, context)

    def check(self, message: messages.Message, id: str, request: messages.Message) -> None:
        """Refuse an invalid reply; in one process all are valid."""

    def describe_error(self, error: Any) -> str:
        """Return a client's error as the record may have it."""
        return str(error)

    def _run_tasks(self, kind: str, number: int, tasks: Sequence[Task]) -> RoundReplies:
        parcels = {
            task.id: messages.Message(
                {
                    "kind": kind,
                    "training": self.training,
                    "round": number,
                    "client": task.id,
                    "trains": task.trains,
                    "version": self.version(task.id, task.local),
                    "held": [] if task.best_local is None else [self.version(task.id, task.best_local)],
                },
                client.to_arrays(task.sent),
            )
            for task in tasks
        }
        self.missing = {}
        replies = self.exchange(parcels, number)
        done = {}
        for id, reply in replies.items():
            header = reply.header
            upload = client.to_tensors(reply.arrays) if header["uploads"] else None
            local, releases = self.local(id, header["version"]), header.get("releases", 0)
            scores, described = header["scores"], header["described"]
            done[id] = ClientReply(upload, local, scores, self.rows[id], described, True, releases)
        return RoundReplies(done, dict(self.missing), min_clients=self._required_replies(len(parcels)))

    def exchange(self, parcels: Mapping[str, messages.Message], number: int) -> dict[str, messages.Message]:
        """Send each client its message and return the valid replies; too few are an error."""
        sealed = self._sealed(parcels)
        requests: dict[str, tuple[str, messages.Message]] = {}
        connected = list(sealed)
        outgoing = [self._message(sealed[id], self.nodes[id], number) for id in connected]
        for id, sent in zip(connected, self.grid.push_messages(outgoing), strict=True):
            if sent is None:
                self.missing[id] = "the server's SuperLink did not accept the message"
            else:
                requests[sent] = (id, sealed[id])
        replies: dict[str, messages.Message] = {}

        def is_complete() -> bool:
            return self.is_complete({id for id, _ in requests.values()})

        for message in messages.collect_replies(self.grid, list(requests), self.deadline, is_complete):
            id, request = requests.pop(message.metadata.reply_to_message_id)
            with self._record_failure(id, request):
                replies[id] = self._accept(message, id, request)
        for id, _ in requests.values():
            self.missing[id] = self.exclusion_reason(id) or f"it did not answer within {self.deadline:g} s"
        self._check_quorum(parcels, replies, number)
        return {id: replies[id] for id in parcels if id in replies}

    def is_complete(self, waiting: set[str]) -> bool:
        """Return whether none of these clients is worth waiting for."""
        return False

    def exclusion_reason(self, id: str) -> str:
        """Return why a client no longer counts, or nothing."""
        return ""

    def _sealed(self, parcels: Mapping[str, messages.Message]) -> dict[str, messages.Message]:
        """Return requests to the connected clients, each with a nonce that its reply must repeat."""
        for id in parcels.keys() - self.nodes.keys():
            self.missing[id] = self.absent.get(id, "it is not connected")
        return {
            id: self.seal(messages.Message({**message.header, "nonce": token_hex(16)}, message.arrays))
            for id, message in parcels.items()
            if id in self.nodes
        }

    def _message(self, message: messages.Message, node: int, number: int) -> Any:
        ttl = None if self.deadline is None else self.deadline + TTL_MARGIN_SECONDS
        return self.grid.create_message(
            messages.to_records(message), MESSAGE_TYPES.get(message.header["kind"], "train"), node, str(number), ttl
        )

    def _accept(self, message: Any, id: str, request: messages.Message) -> messages.Message:
        """Return the reply as a message, if it is intact, from this client, and to this request."""
        context = _describe_request(id, request)
        if message.has_error():
            is_offline = message.error.code == NODE_UNAVAILABLE
            reason = "it is not connected" if is_offline else self.describe_error(message.error.reason)
            reason = self.exclusion_reason(id) or reason
            raise FederationError(f"{context}: {reason}")
        return self._check_reply(messages.from_records(message.content, context), id, request)

    def _check_reply(self, message: messages.Message, id: str, request: messages.Message) -> messages.Message:
        context = _describe_request(id, request)
        message = self.unseal(message, id, context)
        if "error" in message.header:
            raise FederationError(f"{context}: {self.describe_error(message.header['error'])}")
        for key in ("kind", "training", "round", "nonce"):
            if message.header.get(key) != request.header[key]:
                raise FederationError(
                    f"{context}: the reply is to another request (its {key} is {str(message.header.get(key))[:80]!r}, "
                    f"not {request.header[key]!r}); it is ignored"
                )
        if message.header.get("client") != id and request.header["kind"] not in MESSAGE_TYPES:
            raise FederationError(f"{context}: the reply is another client's")
        try:
            self.check(message, id, request)
        except FederationError as error:
            raise FederationError(f"{context}: {error}") from error
        return message

    @contextmanager
    def _record_failure(self, id: str, request: messages.Message) -> Iterator[None]:
        """Record whatever is wrong with one client's reply: only that client is missing."""
        try:
            yield
        except FederationError as error:
            self.missing[id] = str(error)
        except Exception as error:
            reason = f"its reply cannot be used ({type(error).__name__}); it is ignored"
            self.missing[id] = f"{_describe_request(id, request)}: {reason}"

    def _required_replies(self, n_clients: int) -> int:
        return ceil(self.quorum * n_clients - 1e-9)

    def _check_quorum(self, parcels: Iterable[str], replies: Mapping[str, Any], number: int) -> None:
        n_clients = len(list(parcels))
        required = self._required_replies(n_clients)
        if len(replies) < required:
            reasons = "\n".join(f"  {id}: {reason}" for id, reason in sorted(self.missing.items()))
            raise FederationError(
                f"round {number}: {len(replies)} of {n_clients} clients answered, and {required} must (quorum "
                f"{self.quorum:g}); the run can be resumed once they are back\n{reasons}"
            )


def _describe_request(id: str, request: messages.Message) -> str:
    return id if request.header["kind"] in MESSAGE_TYPES else f"client {id}, round {request.header['round']}"


class InProcessEngine(FlowerEngine):
    """Run every client in this process, each with its own samples and its own Context."""

    def __init__(self, world: World) -> None:
        ids = sorted(world.members)
        grid = local_grid({id: client.TrainingHandler({"": client.client_training(world, id)}) for id in ids})
        super().__init__(grid, grid.nodes, "")
        self.rows = {id: len(member.train) for id, member in world.members.items()}
        self.known_versions: dict[str, client.Versions] = {id: {} for id in ids}
        self.n_planted = 0

    def version(self, id: str, local: Local) -> int:
        """Return the version of local tensors; those that the client does not have are stored there first."""
        local = as_tensors(local)
        for version, tensors in self.known_versions[id].items():
            if tensors is local:
                return version
        self.n_planted -= 1
        self.known_versions[id][self.n_planted] = local
        flat, header = client.pack_versions("", {**self._stored_versions(id), self.n_planted: local})
        self.grid.keep(id, messages.Message(header, client.to_arrays(flat)))
        return self.n_planted

    def local(self, id: str, version: int) -> Tensors:
        stored, known_versions = self._stored_versions(id), self.known_versions[id]
        for held, values in stored.items():
            if held in known_versions and not max_relative_difference(known_versions[held], values):
                stored[held] = known_versions[held]
        self.known_versions[id] = stored
        return self.known_versions[id][version]

    def _stored_versions(self, id: str) -> client.Versions:
        state = self.grid.state(id)
        return client.unpack_versions(client.to_tensors(state.arrays), state.header, "")


def local_grid(desks: Mapping[str, Any]) -> Any:
    """Create Flower's grid and ClientApp without processes: a message is a call of a handler's or a site's `answer`."""
    app = import_flower()
    TaskIdentity = api.TaskIdentity
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    client_app = api.ClientApp()
    by_node = dict(enumerate(desks, start=1000))

    def train(message: Any, context: Any) -> Any:
        request = messages.unseal(messages.from_records(message.content, "a client"), "a client")
        reply, after = desks[by_node[context.node_id]].answer(
            request, messages.read_context_state(context, CLIENT_STATE)
        )
        context.state = messages.to_records(after)
        return app.Message(messages.to_records(messages.seal(reply)), reply_to=message)

    def call(message: Any, context: Any) -> Any:
        try:
            return client_app(message, context)
        except Exception as error:
            is_explained = isinstance(error, FedVLMError)  # a person can fix it: without a trace
            reason = str(error) if is_explained else traceback.format_exc()
            return app.Message(app.Error(2, reason), reply_to=message)

    client_app.train()(train)
    client_app.query()(train)

    class LocalGrid:
        def __init__(self) -> None:
            self.nodes = {id: node for node, id in by_node.items()}
            self.messages: list[Any] = []  # every message of the last exchange, both ways
            self.contexts = {node: app.Context(1, node, {}, app.RecordDict(), {}) for node in by_node}

        def keep(self, id: str, state: messages.Message) -> None:
            self.contexts[self.nodes[id]].state = messages.to_records(state)

        def state(self, id: str) -> messages.Message:
            return messages.read_context_state(self.contexts[self.nodes[id]], CLIENT_STATE)

        def create_message(
            self, content: Any, message_type: str, dst_node_id: int, group_id: str, ttl: Any = None
        ) -> Any:
            return app.Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

        def get_node_ids(self) -> Iterable[int]:
            return list(self.contexts)

        def push_messages(self, outgoing: Iterable[Any]) -> Iterable[str]:
            self.messages = list(outgoing)
            for number, message in enumerate(self.messages):
                message.metadata.__dict__["_message_id"] = f"{number}"
            return [message.metadata.message_id for message in self.messages]

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
            pushed = [message for message in self.messages if message.metadata.message_id in message_ids]
            replies = [call(message, self.contexts[message.metadata.dst_node_id]) for message in pushed]
            self.messages = [*self.messages, *replies]
            return replies

    return LocalGrid()
