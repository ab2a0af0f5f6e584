"""Flower's grid and ClientApp in one process: a message is a call, a Context is a client's own."""

import traceback
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from fedvlm.channel.settings import fits_secagg
from fedvlm.core import Tensors
from fedvlm.engines.client import Local, World, here
from fedvlm.engines.flower import api
from fedvlm.engines.flower import secure as flower_secure
from fedvlm.engines.flower.api import flower
from fedvlm.engines.flower.client import (
    Desk,
    Versions,
    arrays,
    own_training,
    pack_versions,
    unpack,
    unpack_versions,
)
from fedvlm.engines.flower.engine import Flower
from fedvlm.engines.flower.wire import Parcel, from_records, seal, state_of, to_records, unseal
from fedvlm.errors import FedVLMError
from fedvlm.tensors import difference


class InProcess(Flower):
    """Every client in this process, each with its own rows and its own Context."""

    def __init__(self, world: World) -> None:
        fits_secagg(world.channel, world.method)
        ids = sorted(world.members)
        grid = local_grid({id: Desk({"": own_training(world, id)}) for id in ids})
        super().__init__(grid, grid.nodes, "", secure=world.channel.secure)
        self.rows = {id: len(one.train) for id, one in world.members.items()}
        self.known: dict[str, Versions] = {id: {} for id in ids}
        self.planted = 0

    def version(self, id: str, local: Local) -> int:
        """Local tensors the client does not have (the first ones, a checkpoint's) are planted."""
        local = here(local)
        for version, known in self.known[id].items():
            if known is local:
                return version
        self.planted -= 1
        self.known[id][self.planted] = local
        flat, about = pack_versions("", {**self._there(id), self.planted: local})
        self.grid.keep(id, Parcel(about, arrays(flat)))
        return self.planted

    def local(self, id: str, version: int) -> Tensors:
        there, known = self._there(id), self.known[id]
        same = {one for one in there if one in known and not difference(known[one], there[one])}
        self.known[id] = {one: (known if one in same else there)[one] for one in there}
        return self.known[id][version]

    def _there(self, id: str) -> Versions:
        state = self.grid.state(id)
        return unpack_versions(unpack(state.arrays), state.about, "")


class Answering(Protocol):
    """A desk, or a whole site."""

    def answer(self, parcel: Parcel, state: Parcel) -> tuple[Parcel, Parcel]: ...


def local_grid(desks: Mapping[str, Answering]) -> Any:
    """Flower's grid and ClientApp without processes: a message is a call."""
    app = flower()
    TaskIdentity = api.TaskIdentity
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    client = api.ClientApp(mods=[flower_secure.mask])
    by_node = dict(enumerate(desks, start=1000))

    def train(message: Any, context: Any) -> Any:
        hidden = flower_secure.request(message.content)
        parcel = unseal(hidden or from_records(message.content, "a client"), "a client")
        reply, after = desks[by_node[context.node_id]].answer(parcel, read_state(context))
        write_state(context, after)
        return app.Message(flower_secure.records(seal(reply), hidden is not None), reply_to=message)

    def call(message: Any, context: Any) -> Any:
        try:
            return client(message, context)
        except Exception as error:
            return app.Message(app.Error(2, explain(error)), reply_to=message)

    client.train()(train)
    client.query()(train)

    class LocalGrid(api.Grid):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            self.nodes = {id: node for node, id in by_node.items()}
            self.messages: list[Any] = []  # every message of the last exchange, both ways
            self.contexts = {
                node: app.Context(1, node, {}, app.RecordDict(), {}) for node in by_node
            }

        def keep(self, id: str, state: Parcel) -> None:
            write_state(self.contexts[self.nodes[id]], state)

        def state(self, id: str) -> Parcel:
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
            asked = [one for one in self.messages if one.metadata.message_id in message_ids]
            replies = [call(one, self.contexts[one.metadata.dst_node_id]) for one in asked]
            self.messages = [*self.messages, *replies]
            return replies

        def send_and_receive(self, messages: Iterable[Any], *, timeout: Any = None) -> Any:
            return self.pull_messages(self.push_messages(messages))

    return LocalGrid()


def read_state(context: Any) -> Parcel:
    return state_of(context, "the state of this client")


def write_state(context: Any, state: Parcel) -> None:
    context.state = to_records(state)


def explain(error: Exception) -> str:
    """An error as the server should read it: one that a person can put right needs no trace."""
    if isinstance(error, FedVLMError):
        return str(error)
    return traceback.format_exc()
