"""Answer Flower messages with the method's verbs, and keep a client's `local` tensors.

`local` tensors are kept by version: the number of the round that made them plus one, and 0 for untrained ones. The
server names the version it continues from, so a round whose reply was lost, or a resumed server, gets the same reply.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedvlm import tensors
from fedvlm.channel.pipeline import UploadPipeline, join_channel_state, split_channel_state
from fedvlm.channel.validation import check_upload
from fedvlm.core import Conditioned, Described, Tensors
from fedvlm.engines.client import ClientReply, Task, World, as_tensors, channel_noise, client_world
from fedvlm.engines.flower.messages import Arrays, Message
from fedvlm.engines.sequential import Sequential, error_context
from fedvlm.errors import FederationError
from fedvlm.storage.files import read_tensors, write_tensors

Versions = dict[int, Tensors]


class LostLocalError(FederationError):
    """Local tensors that a client no longer has, or never had."""


def to_arrays(values: Tensors) -> Arrays:
    return {key: value.detach().contiguous().numpy() for key, value in values.items()}


def to_tensors(values: Arrays) -> Tensors:
    return {key: torch.tensor(value) for key, value in values.items()}


def pack_versions(key: str, versions: Versions) -> tuple[Tensors, dict[str, Any]]:
    names = [(version, name) for version, version_tensors in versions.items() for name in version_tensors]
    flat = {str(place): versions[v][name] for place, (v, name) in enumerate(names)}
    return flat, {"training": key, "versions": list(versions), "names": names}


def unpack_versions(flat: Tensors, header: Mapping[str, Any], key: str) -> Versions:
    """Return the versions of one training; none if these are of another one."""
    if header.get("training") != key:
        return {}
    out: Versions = {version: {} for version in header["versions"]}
    for place, (version, name) in enumerate(header["names"]):
        out[version][name] = flat[str(place)]
    return out


@dataclass(frozen=True)
class ClientTraining:
    """Hold one training of one client: its own samples, and where its `local` tensors are kept."""

    key: str
    id: str
    world: World
    folder: Path | None = None  # None: only in the state that is handed in and out

    def read(self, state: Message, version: int) -> Versions:
        """Read the versions from the state within a run, and from the file after a restart or in a second run."""
        held = unpack_versions(to_tensors(state.arrays), state.header, self.key)
        if version in held or self.folder is None or not self.path.exists():
            return held
        return unpack_versions(*read_tensors(self.path), self.key)

    def write(self, versions: Versions) -> Message:
        flat, header = pack_versions(self.key, versions)
        if self.folder is not None:
            write_tensors(self.path, flat, header)
        return Message(header, to_arrays(flat))

    def restore(self, state: Message) -> Message:
        """Restore earlier versions beside the present ones: the server may continue from either."""
        has_file = self.folder is not None and self.path.exists()
        stored = unpack_versions(*read_tensors(self.path), self.key) if has_file else {}
        return self.write({**stored, **unpack_versions(to_tensors(state.arrays), state.header, self.key)})

    @property
    def path(self) -> Path:
        assert self.folder is not None
        return self.folder / "local.safetensors"


def client_training(world: World, id: str) -> ClientTraining:
    return ClientTraining("", id, client_world(world, id))


@dataclass
class TrainingHandler:
    """Answer rounds and adaptations of the known trainings."""

    trainings: dict[str, ClientTraining] = field(default_factory=dict)
    on_adapted: Callable[[ClientTraining, Tensors, Tensors], None] | None = None  # with what was sent and what came

    def answer(self, message: Message, state: Message) -> tuple[Message, Message]:
        """Return the reply and the new state; `local` is in the state and never in the reply."""
        header = message.header
        training = self.trainings.get(header["training"])
        if training is None:
            raise FederationError(f"the training {header['training']} is not open here; the server must open it first")
        world, id, number, version = training.world, training.id, header["round"], header["version"]
        held = training.read(state, version)
        initial_local = tensors.copy(world.method.init(world.frozen)[1])
        if version and version not in held:
            raise LostLocalError(
                f"{error_context(world, number, id)}: the server continues from local tensors of version {version}, "
                f"but this client has {sorted(held) or 'none'}; bring its folder of personal state back, or run the "
                "experiment again from the start"
            )
        sent = to_tensors(message.arrays)
        local, channel_state = split_channel_state(held[version] if version else initial_local)
        task = Task(id, sent, local, header["trains"])
        engine = Sequential(world)
        adapts = header["kind"] == "adapt"
        done = (engine.adapt if adapts else engine.round)(number, [task]).replies[id]
        after, upload = version, done.upload or {}
        if done.upload is not None:
            check_upload(upload, initial_local, error_context(world, number, id))
            draw = channel_noise(world, id, number)
            upload, channel_state = UploadPipeline(world.channel).encode(upload, sent, channel_state, draw)
        if task.trains:
            after = number + 1
            keep = {version, *header["held"]}
            held = {held_version: value for held_version, value in held.items() if held_version in keep}
            state = training.write(
                {**held, after: join_channel_state(done.local_tensors, {} if adapts else channel_state)}
            )
        if adapts and self.on_adapted is not None:
            self.on_adapted(training, sent, done.local_tensors)
        reply = {
            **{key: header[key] for key in ("kind", "training", "round", "nonce")},
            "client": id,
            "version": after,
            "uploads": done.upload is not None,
            "scores": done.scores,
            "described": describe_local(world, sent, done, adapts) if task.trains else {},
        }
        return Message(reply, to_arrays(upload)), state


def describe_local(world: World, sent: Tensors, done: ClientReply, adapts: bool) -> dict[str, float]:
    """Return the few numbers that a method reports of local tensors, which stay here."""
    method = world.method
    if adapts and isinstance(method, Described):
        return dict(method.describe(world.frozen, sent, as_tensors(done.local)))
    if not adapts and isinstance(method, Conditioned):
        return {"condition": float(method.condition(as_tensors(done.local)))}
    return {}
