"""The server's door: who is behind a node, and whether it opens the training."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedvlm.engines.flower.engine import Flower
from fedvlm.engines.flower.wire import Parcel

if TYPE_CHECKING:
    from fedvlm.deploy.remote import Remote


class Door(Flower):
    """Asks nodes who they are and to open the training; who does not answer is not missed."""

    def __init__(self, remote: "Remote", nodes: Mapping[str, int], patience: float) -> None:
        super().__init__(remote.grid, nodes, remote.training, 0.0, patience)
        self.remote = remote
        self.names: dict[str, str] = {}  # the sites behind the nodes, as far as they have answered

    def seal(self, parcel: Parcel) -> Parcel:
        return self.remote.seal(parcel)

    def unseal(self, parcel: Parcel, id: str, where: str) -> Parcel:
        parcel = self.remote.unseal(parcel, id, where)
        self.names[id] = str(parcel.about["client"])
        return parcel

    def reason(self, said: Any) -> str:
        return self.remote.reason(said)

    def check(self, parcel: Parcel, id: str, request: Parcel) -> None:
        self.remote.check_opening(parcel, request)

    def enough(self, waiting: set[str]) -> bool:
        """Whoever else is connected to the server cannot hold a run up."""
        late = set(self.remote.kit.sites) - {*self.names.values(), *self.remote.nodes}
        return all(self.remote.left(name) for name in late)
