"""The server's door: who is behind a node, and whether it opens the training."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedvlm.engines.flower.engine import FlowerEngine
from fedvlm.engines.flower.wire import Message

if TYPE_CHECKING:
    from fedvlm.deploy.remote import RemoteEngine


class OpeningExchange(FlowerEngine):
    """Asks nodes who they are and to open the training; who does not answer is not missed."""

    def __init__(self, remote: "RemoteEngine", nodes: Mapping[str, int], patience: float) -> None:
        super().__init__(remote.grid, nodes, remote.training, 0.0, patience)
        self.remote = remote
        self.site_names: dict[str, str] = {}  # the sites behind the nodes, as far as they have answered

    def seal(self, message: Message) -> Message:
        return self.remote.seal(message)

    def unseal(self, message: Message, id: str, context: str) -> Message:
        message = self.remote.unseal(message, id, context)
        self.site_names[id] = str(message.about["client"])
        return message

    def describe_error(self, error: Any) -> str:
        return self.remote.describe_error(error)

    def check(self, message: Message, id: str, request: Message) -> None:
        self.remote.check_opening(message, request)

    def is_complete(self, waiting: set[str]) -> bool:
        """Whoever else is connected to the server cannot hold a run up."""
        awaited = set(self.remote.kit.sites) - {*self.site_names.values(), *self.remote.nodes}
        return all(self.remote.exclusion_reason(name) for name in awaited)
