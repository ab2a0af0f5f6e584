"""The engine of a deployed run: Flower's messages to real sites, signed both ways."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from torch import Tensor

from fedvlm import tensors
from fedvlm.channel import Channel
from fedvlm.channel.validate import plausible
from fedvlm.core import Tensors
from fedvlm.deploy.keys import Signer, Verifier
from fedvlm.deploy.kits import ServerKit
from fedvlm.deploy.site import fingerprint, key_of
from fedvlm.engines.client import Answers, Task
from fedvlm.engines.flower.client import arrays, unpack
from fedvlm.engines.flower.engine import Flower
from fedvlm.engines.flower.wire import Parcel
from fedvlm.errors import FederationError
from fedvlm.runner.run import PARTS

SAME = 1e-4  # relative: what the encoders of two machines may differ by
OPEN = 600.0  # seconds a site has to open a training: it may have to embed its pictures first
AGAIN = 60.0  # seconds until a site that took no part is asked again: it may have consented


@dataclass(frozen=True)
class Opened:
    """What a site has told of itself when it opened a training."""

    about: Mapping[str, Any]
    first: Tensors  # shared tensors as it would start from them
    text: Tensor | None


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
        self.counts = {name: dict.fromkeys(PARTS, 0) for name in kit.sites}  # rows of each part
        self.turned_away: dict[int, float] = {}  # nodes of sites that took no part, and when
        self.strangers: dict[int, str] = {}  # nodes that are nobody's here; never asked again

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
            self.join(OPEN)
            late = set(self.kit.sites) - set(self.nodes)
            if late <= self.absent.keys() or monotonic() > end:
                break
            sleep(0.5)
        self.missing = {id: self.absent.get(id, "it is not connected") for id in sorted(late)}
        self.missing |= {f"node {node}": why for node, why in self.strangers.items()}
        self._count(self.kit.sites, self.nodes, 0)
        first, *others = sorted(self.nodes)
        for name in others:
            if why := self._differs(first, name):
                raise FederationError(why)

    def join(self, patience: float) -> None:
        """Opens the training at nodes that have not been asked, or were turned away a while ago."""
        past = {*self.nodes.values(), *self.strangers}
        past |= {node for node, when in self.turned_away.items() if monotonic() - when < AGAIN}
        new = {f"node {one}": one for one in self.grid.get_node_ids() if one not in past}
        if not new:
            return
        about = {"kind": "open", "training": self.training, "round": 0, "spec": self.spec}
        parcel = Parcel(about, arrays(self.reference))
        door = Door(self, new, patience)
        for id, reply in door.exchange(dict.fromkeys(new, parcel), 0).items():
            self._welcome(reply, new[id])
        for id, why in door.missing.items():
            if id in door.names:
                self._turn_away(new[id], door.names[id], why.removeprefix(f"{id}: "))
            else:
                self.strangers[new[id]] = why

    def _turn_away(self, node: int, name: str, why: str) -> None:
        self.absent[name] = why
        self.turned_away[node] = monotonic()

    def _welcome(self, reply: Parcel, node: int) -> None:
        about, values = reply.about, unpack(reply.arrays)
        name = about["client"]
        first = {key[7:]: value for key, value in values.items() if key.startswith("shared/")}
        self.nodes[name] = node
        self.absent.pop(name, None)
        self.sites[name] = Opened(about, first, values.get("text"))
        self.counts[name] = {
            part: plausible(about["rows"][part], self.channel, f"site {name}") for part in PARTS
        }
        self.rows[name] = self.counts[name]["train"]

    def _differs(self, first: str, name: str) -> str | None:
        """How a site differs from another: one encoder, one list of classes, one first state."""
        one, other = self.sites[first], self.sites[name]
        for key in ("encoder", "classes", "dim", "template"):
            mine, theirs = one.about.get(key, ""), other.about.get(key, "")
            if key == "encoder":
                mine, theirs = fingerprint(mine), fingerprint(theirs)
            if mine != theirs:
                return (
                    f"sites {first} and {name} do not have the same {key}: {mine!r} and "
                    f"{theirs!r}; all sites need the same, to the fingerprint"
                )
        if tensors.difference(one.first, other.first) > SAME:
            return (
                f"sites {first} and {name} start from different tensors, though their "
                "encoders are the same; do they have the same templates and versions?"
            )
        return None

    def round(self, number: int, tasks: Sequence[Task]) -> Answers:
        """Sites that were not there are let in if they fit those that were."""
        there = set(self.nodes)
        if any(task.id not in there for task in tasks):
            self.join(self.kit.deadline)
        for name in self.nodes.keys() - there:
            if why := self._differs(min(there), name):
                self._turn_away(self.nodes.pop(name), name, why)
        return super().round(number, tasks)


class Door(Flower):
    """Asks nodes who they are and to open the training; who does not answer is not missed."""

    def __init__(self, remote: Remote, nodes: Mapping[str, int], patience: float) -> None:
        super().__init__(remote.grid, nodes, remote.training, 0.0, patience)
        self.remote = remote
        self.names: dict[str, str] = {}  # the sites behind the nodes, as far as they have answered

    def seal(self, parcel: Parcel) -> Parcel:
        return self.remote.seal(parcel)

    def unseal(self, parcel: Parcel, id: str, where: str) -> Parcel:
        parcel = self.remote.unseal(parcel, id, where)
        self.names[id] = str(parcel.about["client"])
        return parcel

    def enough(self) -> bool:
        """Whoever else is connected to the server cannot hold a run up."""
        return {*self.names.values(), *self.remote.nodes} >= set(self.remote.kit.sites)
