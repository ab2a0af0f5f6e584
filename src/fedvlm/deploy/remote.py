"""The engine of a deployed run: Flower's messages to real sites, signed both ways."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from fedvlm import tensors
from fedvlm.channel import Channel
from fedvlm.channel.validate import plausible, schema
from fedvlm.core import Tensors
from fedvlm.data.splits import PARTS
from fedvlm.deploy.door import Door
from fedvlm.deploy.events import Note, unnoted
from fedvlm.deploy.keys import Signer, Verifier
from fedvlm.deploy.kits import ServerKit
from fedvlm.deploy.membership import member, why_out
from fedvlm.deploy.reasons import sentence
from fedvlm.deploy.site import fingerprint, key_of
from fedvlm.deploy.words import LARGE, check_reply
from fedvlm.engines.client import Answers, Task
from fedvlm.engines.flower.client import arrays, unpack
from fedvlm.engines.flower.engine import Flower
from fedvlm.engines.flower.wire import Parcel
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.storage.sealed import read_json, write_json

KNOWN = {torch.float32, torch.float64, torch.int64, torch.int32, torch.int8}
SAME = 1e-4  # relative: what the encoders of two machines may differ by
OPEN = 600.0  # seconds a site has to open a training: it may have to embed its images first
AGAINST = 1000  # uploads that may have left a site and never arrived; more it would not allow
NODES = "nodes.json"  # in the server's folder
SAY = 10.0  # seconds between two lines about sites that are waited for
AGAIN = 60.0  # seconds until a site that took no part is asked again: it may have consented


@dataclass(frozen=True)
class Opened:
    """What a site has told of itself when it opened a training."""

    about: Mapping[str, Any]
    first: Tensors  # shared tensors as it would start from them
    text: Tensor | None

    @property
    def texts(self) -> Tensors:
        return {} if self.text is None else {"class texts": self.text}


class Remote(Flower):
    """Sites that are late are waited for, or let in when they come; each has to prove its key."""

    def __init__(
        self,
        grid: Any,
        kit: ServerKit,
        spec: Any,
        reference: Tensors,
        note: Note = unnoted,
        others: Iterable[int] = (),  # nodes that are not to be asked
    ) -> None:
        self.note, self.said = note, 0.0  # when it last said whom it waits for
        self.channel = Channel(**spec["identity"]["channel"])
        secure = self.channel.secure
        super().__init__(grid, {}, key_of(spec), kit.quorum, kit.deadline, secure)
        self.kit, self.spec, self.reference = kit, spec, reference
        self.sign = Signer(kit.folder / "signing.key")
        self.keys: dict[str, str] = {}  # that the sites which are there have come with
        self.sites: dict[str, Opened] = {}
        self.counts = {name: dict.fromkeys(PARTS, 0) for name in kit.sites}  # rows of each part
        self.base = ""  # a site that the others are like
        self.turned_away: dict[int, float] = {}  # nodes of sites that took no part, and when
        self.strangers: dict[int, str] = {}  # nodes that are nobody's here; never asked again
        self.others = frozenset(others)

    def seal(self, parcel: Parcel) -> Parcel:
        return self.sign(parcel)

    def unseal(self, parcel: Parcel, id: str, where: str) -> Parcel:
        name = str(parcel.about.get("client"))
        if name not in self.kit.sites:
            raise FederationError(f"{where}: {name[:80]!r} is no site of this federation")
        if why := self.left(name):
            raise FederationError(f"{where}: {why}")
        try:
            Verifier(member(self.kit.folder, name).key.encode())(parcel, f"site {name}")
        except FederationError as error:
            raise FederationError(f"{where}: {error}") from error
        return parcel

    def left(self, id: str) -> str:
        return why_out(self.kit.folder, id)

    def enough(self, waiting: set[str]) -> bool:
        return all(self.left(name) for name in waiting)

    def let_go(self) -> None:
        """Who was revoked is out; who has a new key is let in again by that."""
        for name in self.kit.sites:
            why = self.left(name)
            if why:
                self.absent[name] = why
            elif name in self.nodes and self.keys[name] != member(self.kit.folder, name).key:
                self.absent[name] = "it has a new key, and is not connected with it yet"
            else:
                continue
            self.nodes.pop(name, None)

    def reason(self, said: Any) -> str:
        """A sentence of ours; of what Flower or a site's process says, a line at most."""
        if type(said) is str:
            inner = said[said.find("{") : said.rfind("}") + 1]  # of a secure sum, inside Flower's
            try:
                said = json.loads(inner)
            except (ValueError, RecursionError):
                plain = " ".join(said.split())[:300]
                return "".join(one for one in plain if one.isprintable())
        return sentence(said)

    def check(self, parcel: Parcel, id: str, request: Parcel) -> None:
        check_reply(parcel, request.about)
        check_arrays(parcel)
        if parcel.about["releases"] > parcel.about["round"] + AGAINST:
            raise FederationError("it says that more of its uploads have left than can have")
        counts, scores = self.counts[id], parcel.about["scores"]
        held = counts["validation"] or counts["train"]
        for part, known in (("validation", held), ("test", counts["test"])):
            if scores[f"{part}_rows"] not in (0, known):
                raise FederationError(
                    f"it says it has {scores[f'{part}_rows']} {part} rows, and said {known} when "
                    "it opened the training"
                )

    def gather(self) -> None:
        """Waits for the sites, as long as the kit says, and opens the training at each."""
        end = monotonic() + self.kit.wait
        while True:
            self.let_go()
            self.join(OPEN)
            late = set(self.kit.sites) - set(self.nodes)
            if late <= self.absent.keys() or monotonic() > end:
                break
            if monotonic() - self.said > SAY:
                self.said = monotonic()
                self.note("waiting", sites=sorted(late), left=round(end - monotonic()))
            sleep(0.5)
        self.missing = {id: self.absent.get(id, "it is not connected") for id in sorted(late)}
        self.missing |= {f"node {node}": why for node, why in self.strangers.items()}
        if self.nodes:
            self._part(min(self._alike(), key=lambda group: (-len(group), min(group))))
        self._count(self.kit.sites, self.nodes, 0)

    def _alike(self) -> list[list[str]]:
        """The sites in groups that can train together."""
        groups: list[list[str]] = []
        for name in sorted(self.nodes):
            for group in groups:
                if self.differs(group[0], name) is None:
                    group.append(name)
                    break
            else:
                groups.append([name])
        return groups

    def _part(self, group: Sequence[str]) -> None:
        """Who does not fit the largest group is missing, by name; it cannot stop the others."""
        self.base = group[0]
        for name in sorted(self.nodes.keys() - set(group)):
            why = self.differs(self.base, name) or ""
            self._turn_away(self.nodes.pop(name), name, why)
            self.missing[name] = why

    def join(self, patience: float) -> None:
        """Opens the training at nodes that have not been asked, or were turned away a while ago."""
        past = {*self.nodes.values(), *self.strangers, *self.others}
        past |= {node for node, when in self.turned_away.items() if monotonic() - when < AGAIN}
        new = {f"node {one}": one for one in self.grid.get_node_ids() if one not in past}
        if not new:
            return
        about = {"kind": "open", "training": self.training, "round": 0, "spec": self.spec}
        parcel = Parcel(about, arrays(self.reference))
        door = self.door(new, patience)
        for id, reply in door.exchange(dict.fromkeys(new, parcel), 0).items():
            self._welcome(reply, new[id])
        for id, why in door.missing.items():
            if id in door.names:
                self._turn_away(new[id], door.names[id], why.removeprefix(f"{id}: "))
            else:
                self.strangers[new[id]] = why

    def door(self, nodes: Mapping[str, int], patience: float) -> Door:
        return Door(self, nodes, patience)

    def _turn_away(self, node: int, name: str, why: str) -> None:
        self.absent[name] = why
        self.note("refused", site=name, why=why)
        self.turned_away[node] = monotonic()

    def _welcome(self, reply: Parcel, node: int) -> None:
        about, values = reply.about, unpack(reply.arrays)
        name = about["client"]
        first = {key[7:]: value for key, value in values.items() if key.startswith("shared/")}
        self.nodes[name] = node
        write_json(self.kit.folder / NODES, {**nodes_of(self.kit), name: node})
        self.keys[name] = member(self.kit.folder, name).key
        self.absent.pop(name, None)
        self.sites[name] = Opened(about, first, values.get("text"))
        self.counts[name] = dict(about["rows"])
        self.rows[name] = self.counts[name]["train"]
        self.note("connected", site=name, rows=self.rows[name])

    def check_opening(self, parcel: Parcel, request: Parcel) -> None:
        """What one site alone can get wrong; how it differs from the others is seen later."""
        check_reply(parcel, request.about)
        check_arrays(parcel, most=float("inf"))  # a first tensor may wait at infinity
        about, wanted = parcel.about, self.spec["classes"]
        if about["opened"] != self.training or (wanted and about["classes"] != wanted):
            raise FederationError("it opened another training, or with other classes")
        if not about["scale"] > 0 or not about["classes"]:
            raise FederationError("the scale of its encoder, or its list of classes, does not fit")
        shape = (len(about["classes"]), about["dim"])
        for key, value in parcel.arrays.items():
            if not (key.startswith("shared/") or (key == "text" and value.shape == shape)):
                raise FederationError("it sends tensors that no opening has")
        for part in PARTS:
            plausible(about["rows"][part], self.channel, "it")
        if self.kit.max_samples and about["rows"]["train"] > self.kit.max_samples:
            raise FederationError(
                f"it says it has {about['rows']['train']} training rows; server.toml believes "
                f"{self.kit.max_samples} at most"
            )

    def differs(self, first: str, name: str) -> str | None:
        """How a site differs from another: one encoder, one list of classes, one first state."""
        one, other = self.sites[first], self.sites[name]
        for key in ("encoder", "classes", "dim", "scale", "local", "template"):
            mine, theirs = one.about.get(key, ""), other.about.get(key, "")
            if key == "encoder":
                mine, theirs = fingerprint(mine), fingerprint(theirs)
            if not _close(mine, theirs):
                return (
                    f"sites {first} and {name} do not have the same {key}: {str(mine)[:80]!r} and "
                    f"{str(theirs)[:80]!r}; all sites need the same, to the fingerprint"
                )
        mine, theirs = (_finite({**each.first, **each.texts}) for each in (one, other))
        if schema(mine) != schema(theirs) or tensors.difference(mine, theirs) > SAME:
            return (
                f"sites {first} and {name} start from different tensors, though their "
                "encoders are the same; do they have the same templates and versions?"
            )
        return None

    def round(self, number: int, tasks: Sequence[Task]) -> Answers:
        """Sites that were not there are let in if they fit those that were."""
        self.let_go()
        there = set(self.nodes)
        if any(task.id not in there and not self.left(task.id) for task in tasks):
            self.join(self.kit.deadline)
        for name in self.nodes.keys() - there:
            if why := self.differs(self.base, name):
                self._turn_away(self.nodes.pop(name), name, why)
        return super().round(number, tasks)


def nodes_of(kit: ServerKit) -> dict[str, int]:
    """The nodes by which sites have proved their names; a node goes with a key."""
    try:
        return {str(name): int(node) for name, node in read_json(kit.folder / NODES).items()}
    except (FedVLMError, AttributeError, TypeError, ValueError):  # none yet, or damaged
        return {}


def check_arrays(parcel: Parcel, most: float = LARGE) -> None:
    """Types that our methods have, and numbers that can be added up."""
    for key, value in unpack(parcel.arrays).items():
        if value.dtype not in KNOWN:
            raise FederationError(f"{key[:80]!r} is of a type that no method uploads")
        if value.numel() and not value.abs().max() <= most:  # also where it is NaN
            raise FederationError(f"{key[:80]!r} holds numbers that are not finite, or huge")


def _finite(values: Tensors) -> Tensors:
    """For a comparison: where both are infinite they are the same."""
    return {key: one.clamp(-LARGE, LARGE) for key, one in values.items()}


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= SAME * abs(one)
    return bool(one == other)
