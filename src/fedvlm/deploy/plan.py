"""Describe one training completely, in bytes that everybody hashes to the same value.

The server proposes a plan. A site checks it against its policy, a person may accept it by its hash, and in a verified
sum all members sign that hash before anything leaves.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from fedvlm.core import Tensors
from fedvlm.deploy.messages import Count, Fields, Key, Number, Text, Texts, parse
from fedvlm.errors import FederationError
from fedvlm.runner.settings import Settings, build

PLAN_DOMAIN = b"fedvlm plan 1\n"
MAX_MEMBERS = 1000
DEFAULT_DEADLINE_DAYS = 7.0  # days a session waits for its members before its keys are erased


class Member(Fields):
    """Hold a member of a verified sum: its name and the public key of its certificate."""

    name: Text
    key: Annotated[str, StringConstraints(max_length=2000)]


class Plan(Fields):
    """Hold everything that decides what a training computes; tensors stand in it by their hashes."""

    format: Literal[1] = 1
    federation: Text = ""
    training: Text  # name of the training within its experiment
    identity: dict[str, Any]  # every setting: method, channel, clients, source, protocol
    classes: Texts
    multi_label: bool = False  # an image may have several of the classes
    seed: Count
    encoder: Text = ""  # fingerprint
    dim: Count = 0
    scale: Number = 0.0  # the encoder's logit scale
    template: Text = ""
    tensors: dict[Text, Key] = Field(default_factory=dict, max_length=16)  # hashes of class texts and reference samples
    members: Annotated[tuple[Member, ...], Field(max_length=MAX_MEMBERS)] = ()  # of a verified sum, by name
    session: Text = ""  # drawn by the server, so that two sessions never have the same plan
    deadline: Text = ""  # time after which the keys of the session are erased
    purpose: Annotated[str, StringConstraints(max_length=2000)] = ""  # what the training is for, in plain words
    contact: Text = ""  # who answers questions about it

    @field_validator("members", mode="before")
    @classmethod
    def _read_list(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    def to_bytes(self) -> bytes:
        """Return the canonical bytes: JSON with sorted keys, without spaces, in ASCII."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @property
    def hash(self) -> str:
        return sha256(PLAN_DOMAIN + self.to_bytes()).hexdigest()

    @property
    def settings(self) -> Settings:
        return build(self.identity)

    @property
    def member_names(self) -> list[str]:
        return [member.name for member in self.members]

    def check_tensors(self, tensors: Tensors) -> None:
        """Refuse tensors that are not those of the plan."""
        found = {name: hash_tensors({"": tensor}) for name, tensor in tensors.items()}
        if wrong := sorted(name for name in {*found, *self.tensors} if found.get(name) != self.tensors.get(name)):
            raise FederationError(f"the plan's tensor {wrong[0][:80]!r} is missing, or is not the one of its hash")


def read_plan(data: bytes) -> Plan:
    """Read a plan from its canonical bytes; other bytes of the same plan are refused."""
    try:
        plan = parse(Plan, json.loads(data), "the plan")
    except (ValueError, RecursionError) as error:
        raise FederationError("the plan cannot be read; it comes from another version of fedvlm") from error
    if plan.to_bytes() != data:
        raise FederationError("the plan is not written in its canonical form; it was changed on its way")
    return plan


def plan_of_spec(spec: Mapping[str, Any], **facts: Any) -> Plan:
    """Return the plan of a training as `open` requests name it, with further facts."""
    names = ("training", "identity", "classes", "seed")
    return Plan(**{name: spec[name] for name in names}, **facts)


def hash_tensors(tensors: Tensors) -> str:
    """Return a hash of names, types, shapes and bytes."""
    total = sha256(b"fedvlm tensors 1\n")
    for name in sorted(tensors):
        value = tensors[name].detach().contiguous()
        total.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode() + b"\n")
        total.update(value.reshape(-1).numpy().tobytes())
    return total.hexdigest()
