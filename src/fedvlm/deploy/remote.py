"""The engine of a deployed run: Flower's messages to real sites, signed both ways."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import numpy as np
from torch import Tensor

from fedvlm import tensors
from fedvlm.channel import Channel
from fedvlm.channel.validate import plausible
from fedvlm.core import Tensors
from fedvlm.data.federation import Member
from fedvlm.deploy.keys import Signer, Verifier
from fedvlm.deploy.kits import ServerKit
from fedvlm.deploy.site import key_of
from fedvlm.engines.flower import Flower
from fedvlm.engines.flower_client import arrays, unpack
from fedvlm.engines.flower_wire import Parcel
from fedvlm.engines.work import Done, Task
from fedvlm.errors import FederationError

SAME = 1e-4  # relative: what the encoders of two machines may differ by
OPEN = 600.0  # seconds a site has to open a training: it may have to embed its pictures first
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Opened:
    """What a site has told of itself when it opened a training."""

    about: Mapping[str, Any]
    first: Tensors  # shared tensors as it would start from them
    text: Tensor | None


def absent(name: str) -> Member:
    """A site that has not told how many rows it has."""
    return Member(name, name, *(np.zeros(0, np.int64) for _ in PARTS))


class Remote(Flower):
    """Sites that are late are waited for, or let in when they come; each has to prove its key."""

    def __init__(self, grid: Any, kit: ServerKit, spec: Mapping[str, Any], reference: Tensors):
        self.channel = Channel(**spec["identity"].get("channel", {}))
        secure = self.channel.secure
        super().__init__(grid, {}, key_of(spec), kit.quorum, kit.deadline, secure)
        self.kit, self.spec, self.reference = kit, spec, reference
        self.sign = Signer(kit.folder / "signing.key")
        self.keys = {name: Verifier(kit.folder / "sites" / f"{name}.pub") for name in kit.sites}
        self.sites: dict[str, Opened] = {}
        self.members = {name: absent(name) for name in kit.sites}
        self.strangers: dict[int, str] = {}  # nodes that could not open the training, and why

    def seal(self, parcel: Parcel) -> Parcel:
        return self.sign(parcel)

    def unseal(self, parcel: Parcel, id: str, where: str) -> Parcel:
        name = str(parcel.about.get("client"))
        if name not in self.keys:
            raise FederationError(f"{where}: {name!r} is no site of this federation")
        try:
            self.keys[name](parcel, f"site {name}")
        except FederationError as error:
            raise FederationError(f"{where}: {error}") from error
        return parcel

    def gather(self) -> None:
        """Waits for the sites, as long as the kit says, and opens the training at each."""
        end = monotonic() + self.kit.wait
        while True:
            self.join()
            late = set(self.kit.sites) - set(self.nodes)
            if not late or monotonic() > end or len(self.strangers) >= len(late):
                break
            sleep(0.5)
        self.missing = {id: "it is not connected" for id in sorted(late)}
        self.missing |= {f"node {node}": why for node, why in self.strangers.items()}
        self._count(self.kit.sites, self.nodes, 0)
        self._compare()

    def join(self) -> None:
        """Opens the training at nodes that have not been asked yet."""
        seen = {*self.nodes.values(), *self.strangers}
        new = {f"node {one}": one for one in self.grid.get_node_ids() if one not in seen}
        if not new:
            return
        about = {"kind": "open", "training": self.training, "round": 0, "spec": self.spec}
        parcel = Parcel(about, arrays(self.reference))
        first = Door(self, new)
        for id, reply in first.exchange(dict.fromkeys(new, parcel), 0).items():
            self._welcome(reply, new[id])
        self.strangers |= {new[id]: why for id, why in first.missing.items()}

    def _welcome(self, reply: Parcel, node: int) -> None:
        about, values = reply.about, unpack(reply.arrays)
        name = about["client"]
        first = {key[7:]: value for key, value in values.items() if key.startswith("shared/")}
        self.nodes[name] = node
        self.sites[name] = Opened(about, first, values.get("text"))
        counts = (
            np.arange(plausible(about["rows"][part], self.channel, f"site {name}"))
            for part in PARTS
        )
        self.members[name] = Member(name, name, *counts)

    def _compare(self) -> None:
        """One encoder, one list of classes and one first state, or no training at all."""
        names = sorted(self.sites)
        one = self.sites[names[0]]
        for name in names[1:]:
            other = self.sites[name]
            for key in ("encoder", "classes", "dim"):
                mine, theirs = (_told(site.about, key) for site in (one, other))
                if mine != theirs:
                    raise FederationError(
                        f"sites {names[0]} and {name} do not have the same {key}: {mine!r} and "
                        f"{theirs!r}; all sites need the same, to the fingerprint"
                    )
            if tensors.difference(one.first, other.first) > SAME:
                raise FederationError(
                    f"sites {names[0]} and {name} start from different tensors, though their "
                    "encoders are the same; do they have the same templates and versions?"
                )

    def round(self, number: int, tasks: Sequence[Task]) -> dict[str, Done]:
        if any(task.id not in self.nodes for task in tasks):
            self.join()
        return super().round(number, tasks)


class Door(Flower):
    """Asks nodes that have not said who they are; whoever does not answer is not missed."""

    def __init__(self, remote: Remote, nodes: Mapping[str, int]) -> None:
        super().__init__(remote.grid, nodes, remote.training, 0.0, OPEN)
        self.seal = remote.seal  # type: ignore[method-assign]
        self.unseal = remote.unseal  # type: ignore[method-assign]


def _told(about: Mapping[str, Any], key: str) -> Any:
    value = about[key]
    return value.rpartition("@")[2] if key == "encoder" else value
