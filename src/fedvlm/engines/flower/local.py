"""Flower's grid and ClientApp in one process: a message is a call, a Context is a client's own."""

import traceback
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from fedvlm.channel.settings import check_secagg
from fedvlm.core import Tensors
from fedvlm.engines.client import Local, World, as_tensors
from fedvlm.engines.flower import api
from fedvlm.engines.flower import secure as flower_secure
from fedvlm.engines.flower.api import import_flower
from fedvlm.engines.flower.client import (
    TrainingHandler,
    Versions,
    client_training,
    pack_versions,
    to_arrays,
    to_tensors,
    unpack_versions,
)
from fedvlm.engines.flower.engine import FlowerEngine
from fedvlm.engines.flower.wire import Message, from_records, read_context_state, seal, to_records, unseal
from fedvlm.errors import FedVLMError
from fedvlm.tensors import max_relative_difference


class InProcessEngine(FlowerEngine):
    """Every client in this process, each with its own rows and its own Context."""

    def __init__(self, world: World) -> None:
        check_secagg(world.channel, world.method)
        ids = sorted(world.members)
        grid = local_grid({id: TrainingHandler({"": client_training(world, id)}) for id in ids})
        super().__init__(grid, grid.nodes, "", secure=world.channel.secure)
        self.rows = {id: len(member.train) for id, member in world.members.items()}
        self.known_versions: dict[str, Versions] = {id: {} for id in ids}
        self.n_planted = 0

    def version(self, id: str, local: Local) -> int:
        """Local tensors the client does not have (the first ones, a checkpoint's) are planted."""
        local = as_tensors(local)
        for version, tensors in self.known_versions[id].items():
            if tensors is local:
                return version
        self.n_planted -= 1
        self.known_versions[id][self.n_planted] = local
        flat, about = pack_versions("", {**self._stored_versions(id), self.n_planted: local})
        self.grid.keep(id, Message(about, to_arrays(flat)))
        return self.n_planted

    def local(self, id: str, version: int) -> Tensors:
        stored, known_versions = self._stored_versions(id), self.known_versions[id]
        same = {
            held_version
            for held_version in stored
            if held_version in known_versions
            and not max_relative_difference(known_versions[held_version], stored[held_version])
        }
        self.known_versions[id] = {
            held_version: (known_versions if held_version in same else stored)[held_version] for held_version in stored
        }
        return self.known_versions[id][version]

    def _stored_versions(self, id: str) -> Versions:
        state = self.grid.state(id)
        return unpack_versions(to_tensors(state.arrays), state.about, "")


class MessageHandler(Protocol):
    """A desk, or a whole site."""

    def answer(self, message: Message, state: Message) -> tuple[Message, Message]: ...


def local_grid(desks: Mapping[str, MessageHandler]) -> Any:
    """Flower's grid and ClientApp without processes: a message is a call."""
    app = import_flower()
    TaskIdentity = api.TaskIdentity
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    client = api.ClientApp(mods=[flower_secure.mask_upload])
    by_node = dict(enumerate(desks, start=1000))

    def train(message: Any, context: Any) -> Any:
        hidden = flower_secure.unwrap_request(message.content)
        request = unseal(hidden or from_records(message.content, "a client"), "a client")
        reply, after = desks[by_node[context.node_id]].answer(request, read_state(context))
        write_state(context, after)
        return app.Message(flower_secure.wrap_reply(seal(reply), hidden is not None), reply_to=message)

    def call(message: Any, context: Any) -> Any:
        try:
            return client(message, context)
        except Exception as error:
            return app.Message(app.Error(2, format_error(error)), reply_to=message)

    client.train()(train)
    client.query()(train)

    class LocalGrid(api.Grid):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            self.nodes = {id: node for node, id in by_node.items()}
            self.messages: list[Any] = []  # every message of the last exchange, both ways
            self.contexts = {node: app.Context(1, node, {}, app.RecordDict(), {}) for node in by_node}

        def keep(self, id: str, state: Message) -> None:
            write_state(self.contexts[self.nodes[id]], state)

        def state(self, id: str) -> Message:
            return read_state(self.contexts[self.nodes[id]])

        def set_run(self, run: Any) -> None: ...

        @property
        def run(self) -> Any:
            return None

        def create_message(
            self, content: Any, message_type: str, dst_node_id: int, group_id: str, ttl: Any = None
        ) -> Any:
            return app.Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

        def get_node_ids(self) -> Iterable[int]:
            return list(self.contexts)

        def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
            self.messages = list(messages)
            for number, message in enumerate(self.messages):
                message.metadata.__dict__["_message_id"] = f"{number}"
            return [message.metadata.message_id for message in self.messages]

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
            pushed = [message for message in self.messages if message.metadata.message_id in message_ids]
            replies = [call(message, self.contexts[message.metadata.dst_node_id]) for message in pushed]
            self.messages = [*self.messages, *replies]
            return replies

        def send_and_receive(self, messages: Iterable[Any], *, timeout: Any = None) -> Any:
            return self.pull_messages(self.push_messages(messages))

    return LocalGrid()


def read_state(context: Any) -> Message:
    return read_context_state(context, "the state of this client")


def write_state(context: Any, state: Message) -> None:
    context.state = to_records(state)


def format_error(error: Exception) -> str:
    """An error as the server should read it: one that a person can put right needs no trace."""
    if isinstance(error, FedVLMError):
        return str(error)
    return traceback.format_exc()
