"""The client's side of Flower: answers a parcel with the method's verbs, and keeps `local`.

`local` tensors are kept by version: the number of the round that made them plus one, and 0 for
those nobody has trained. The server names the version it goes on from, so that a round whose
answer was lost, or a server that was resumed, is answered as if nothing had happened.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from fedvlm import tensors
from fedvlm.channel import validate
from fedvlm.channel.secure import to_secagg
from fedvlm.channel.uploads import join, leave, split
from fedvlm.core import Conditioned, Described, Tensors, sums
from fedvlm.engines.client import Done, Task, World, drawing, here, own_world
from fedvlm.engines.flower.wire import Arrays, Parcel
from fedvlm.engines.single import Single, where
from fedvlm.errors import FederationError
from fedvlm.storage.sealed import read_tensors, write_tensors

Versions = dict[int, Tensors]


class Lost(FederationError):
    """Local tensors that a client no longer has, or never had."""


def arrays(values: Tensors) -> Arrays:
    return {key: value.detach().contiguous().numpy() for key, value in values.items()}


def unpack(values: Arrays) -> Tensors:
    return {key: torch.tensor(value) for key, value in values.items()}


def pack_versions(key: str, versions: Versions) -> tuple[Tensors, dict[str, Any]]:
    names = [(version, name) for version, one in versions.items() for name in one]
    flat = {str(place): versions[v][name] for place, (v, name) in enumerate(names)}
    return flat, {"training": key, "versions": list(versions), "names": names}


def unpack_versions(flat: Tensors, about: Mapping[str, Any], key: str) -> Versions:
    """The versions of one training; none if these are another's."""
    if about.get("training") != key:
        return {}
    out: Versions = {version: {} for version in about["versions"]}
    for place, (version, name) in enumerate(about["names"]):
        out[version][name] = flat[str(place)]
    return out


@dataclass(frozen=True)
class OwnTraining:
    """One training as one client knows it: a world of its own rows, and where it keeps `local`."""

    key: str
    id: str
    world: World
    folder: Path | None = None  # None: only in the state that is handed in and out

    def read(self, state: Parcel, version: int) -> Versions:
        """Within a run from its state; from the file after a restart, or in a second run."""
        held = unpack_versions(unpack(state.arrays), state.about, self.key)
        if version in held or self.folder is None or not self.path.exists():
            return held
        return unpack_versions(*read_tensors(self.path), self.key)

    def write(self, versions: Versions) -> Parcel:
        flat, about = pack_versions(self.key, versions)
        if self.folder is not None:
            write_tensors(self.path, flat, about)
        return Parcel(about, arrays(flat))

    def back(self, state: Parcel) -> Parcel:
        """Versions as they were, beside those that are there: the server may go on from either."""
        there = Parcel({}) if self.folder is None else self.read_file()
        both = [unpack_versions(unpack(one.arrays), one.about, self.key) for one in (there, state)]
        return self.write({**both[0], **both[1]})

    def read_file(self) -> Parcel:
        if not self.path.exists():
            return Parcel({})
        flat, about = read_tensors(self.path)
        return Parcel(about, arrays(flat))

    @property
    def path(self) -> Path:
        assert self.folder is not None
        return self.folder / "local.safetensors"


def own_training(world: World, id: str) -> OwnTraining:
    return OwnTraining("", id, own_world(world, id))


class Guard(Protocol):
    """What a site does with what it has adapted; in one process nothing."""

    def adapted(self, training: OwnTraining, sent: Tensors, local: Tensors) -> None: ...


@dataclass
class Desk:
    """Answers rounds and adaptations of the trainings it knows."""

    trainings: dict[str, OwnTraining] = field(default_factory=dict)
    guard: Guard | None = None

    def answer(self, parcel: Parcel, state: Parcel) -> tuple[Parcel, Parcel]:
        """The reply and the new state; `local` is in the state and never in the reply."""
        about = parcel.about
        training = self.trainings.get(about["training"])
        if training is None:
            raise FederationError(
                f"the training {about['training']} is not open here; the server opens it first"
            )
        world, id, number, version = training.world, training.id, about["round"], about["version"]
        held = training.read(state, version)
        fresh = tensors.copy(world.method.init(world.frozen)[1])
        if version and version not in held:
            raise Lost(
                f"{where(world, number, id)}: the server goes on from local tensors of version "
                f"{version}, but this client has {sorted(held) or 'none'}; bring its folder of "
                "personal state back, or run the experiment again from the start"
            )
        sent = unpack(parcel.arrays)
        local, kept = split(held[version] if version else fresh)
        task = Task(id, sent, local, about["trains"])
        engine = Single(world)
        adapts = about["kind"] == "adapt"
        done = (engine.adapt if adapts else engine.round)(number, [task]).done[id]
        after, upload, masked = version, done.upload or {}, False
        place = where(world, number, id)
        if done.upload is not None:
            validate(upload, fresh, place)
            draw = drawing(world, id, number)
            upload, kept = leave(world.channel, upload, sent, kept, draw)
            if masked := world.channel.secure and bool(upload):
                upload = to_secagg(upload, sent, share(world, id, about), world.channel, place)
        if task.trains:
            after = number + 1
            keep = {version, *about["held"]}
            held = {one: value for one, value in held.items() if one in keep}
            state = training.write({**held, after: join(done.own, {} if adapts else kept)})
        if adapts and self.guard is not None:
            self.guard.adapted(training, sent, done.own)
        reply = {
            **{key: about[key] for key in ("kind", "training", "round", "nonce")},
            "client": id,
            "masked": masked,
            "version": after,
            "uploads": done.upload is not None,
            "scores": done.scores,
            "described": described(world, sent, done, adapts) if task.trains else {},
        }
        return Parcel(reply, arrays(upload)), state


def share(world: World, id: str, about: Mapping[str, Any]) -> float:
    """What a client weighs in a secure sum, 1 at most: its own choice, or a server that gives the
    others no weight would see this one's upload."""
    rows = len(world.members[id].train)
    if sums(world.method) != "rows":
        return 1.0
    if not 0 < rows <= about["largest"]:
        raise FederationError(
            f"{where(world, about['round'], id)}: the server says that no client has more than "
            f"{about['largest']} rows, but this one has {rows}; it runs another version"
        )
    return float(rows / about["largest"])


def described(world: World, sent: Tensors, done: Done, adapts: bool) -> dict[str, float]:
    """The few numbers that a method says of local tensors, which stay here."""
    method = world.method
    if adapts and isinstance(method, Described):
        return dict(method.describe(world.frozen, sent, here(done.local)))
    if not adapts and isinstance(method, Conditioned):
        return {"condition": float(method.condition(here(done.local)))}
    return {}
