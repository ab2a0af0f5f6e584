"""Make and check the signed statements of a verified sum; what everybody does, whichever way messages travel.

A session begins with a plan that every member signs together with a key for this session alone (`Agreement`). Every
upload comes with a statement that is bound to the session, the round, the state it was computed at and all uploads of
the round before (`UploadStatement`), so that two views of one session show. At the end every member signs the final
state and the head of its ledger (`EndStatement`).
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from pydantic import Field, StringConstraints
from torch import Tensor

from fedvlm.channel import verified
from fedvlm.core import Frozen, Method, Tensors, upload_sum
from fedvlm.deploy.identity.keys import Signer, sign_bytes, verify_bytes
from fedvlm.deploy.messages import Fields, Key, Text, parse
from fedvlm.deploy.plan import Plan, hash_tensors
from fedvlm.errors import FederationError
from fedvlm.parts.findings import per_finding
from fedvlm.runner.settings import Settings

COUNTS_ROUND = -1  # the first sum is of class counts
SCORES_KEY = "channel/scores"  # validation and test counts and the summed loss travel inside the sum
SCORE_NAMES = ("validation_rows", "validation_hits", "test_rows", "test_hits", "loss")
MAX_STATE_DIFFERENCE = 1e-6  # of a tensor's norm, that two machines' aggregates may differ by
TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "int32": torch.int32}


class Statement(Fields):
    """Hold what a member signs; the signature is not part of what it covers."""

    domain: ClassVar[str]
    member: Text
    signature: Annotated[str, StringConstraints(max_length=400)] = ""

    def signed_bytes(self) -> bytes:
        words = self.model_dump(mode="json", exclude={"signature"})
        return f"fedvlm {self.domain} 1\n".encode() + json.dumps(words, sort_keys=True).encode()


class Agreement(Statement):
    """Agree to a plan and its members, with a key of this session and a commitment to the site's data."""

    domain = "agreement"
    plan: Key
    members: Key
    key: Key  # X25519, public
    data: Key  # salted hash of the site's samples, so that a restored folder cannot reuse a mask for others


class UploadStatement(Statement):
    """Bind a masked upload to its session, round, state and the uploads before it."""

    domain = "upload"
    session: Key
    round: Annotated[int, Field(ge=COUNTS_ROUND, le=10**9)]
    state: Key
    previous: Key
    upload: Key
    layout: Annotated[list[Text], Field(max_length=10_000)]  # type, shape and name of each tensor


class EndStatement(Statement):
    """Sign the final state, all that led to it, and the head of the site's ledger."""

    domain = "end"
    session: Key
    state: Key
    previous: Key
    ledger: Key


S = TypeVar("S", bound=Statement)


def sign(statement: S, signer: Signer) -> S:
    signature = b64encode(sign_bytes(signer, statement.signed_bytes())).decode()
    return statement.model_copy(update={"signature": signature})


def read_statements(kind: type[S], entries: Any, plan: Plan) -> dict[str, S]:
    """Return the statements of all members, each signed by the key that the plan names."""
    name = kind.domain
    if not isinstance(entries, list):
        raise FederationError(f"the {name}s of the session are not a list")
    keys = {member.name: member.key for member in plan.members}
    out: dict[str, S] = {}
    for entry in entries:
        statement = parse(kind, entry, f"a member's {name}")
        if statement.member not in keys or statement.member in out:
            raise FederationError(f"there must be one {name} of each member, got {statement.member[:80]!r} too")
        try:
            signature = b64decode(statement.signature, validate=True)
        except ValueError:
            signature = b""
        if not verify_bytes(keys[statement.member].encode(), statement.signed_bytes(), signature):
            raise FederationError(f"the {name} of {statement.member} is not signed by its key; it is ignored")
        out[statement.member] = statement
    if missing := sorted(keys.keys() - out.keys()):
        raise FederationError(f"the {name} of {missing[0]} is missing; a verified sum needs every member")
    return {member: out[member] for member in sorted(out)}


def hash_words(domain: str, *words: Any) -> str:
    return sha256(f"fedvlm {domain} 1\n".encode() + json.dumps(words, sort_keys=True).encode()).hexdigest()


def hash_members(plan: Plan) -> str:
    return hash_words("members", [member.model_dump(mode="json") for member in plan.members])


def hash_statements(statements: Mapping[str, Statement]) -> str:
    """Return one hash of what all members signed."""
    return hash_words("set", [statements[name].signed_bytes().decode() for name in sorted(statements)])


def read_agreements(entries: Any, plan: Plan) -> dict[str, Agreement]:
    """Return the agreements of all members, if they are to this plan and these members, with distinct keys."""
    agreements = read_statements(Agreement, entries, plan)
    for agreement in agreements.values():
        if (agreement.plan, agreement.members) != (plan.hash, hash_members(plan)):
            raise FederationError(f"{agreement.member} has agreed to another plan or to other members; nothing leaves")
    if len({agreement.key for agreement in agreements.values()}) < len(agreements):
        raise FederationError("two members have the same session key; nothing leaves")
    return agreements


def expected_upload(session: str, number: int, state: str, previous: str) -> dict[str, Any]:
    return {"session": session, "round": number, "state": state, "previous": previous}


def read_uploads(
    entries: Any, vectors: Mapping[str, verified.Vector], plan: Plan, expected: Mapping[str, Any]
) -> dict[str, UploadStatement]:
    """Return the statements of a round's uploads, if all members computed them at the same point."""
    statements = read_statements(UploadStatement, entries, plan)
    if sorted(vectors) != sorted(statements):
        raise FederationError("there must be one masked upload of each member; the round is void")
    layouts = {json.dumps(statement.layout) for statement in statements.values()}
    for member, statement in statements.items():
        for name, value in expected.items():
            if getattr(statement, name) != value:
                raise FederationError(
                    f"the upload of {member} belongs to another {name} of the session than this site's; somebody was "
                    "shown other messages, and nothing leaves"
                )
        if hash_vector(vectors[member]) != statement.upload:
            raise FederationError(f"the masked upload of {member} is not the one that it signed; the round is void")
    if len(layouts) > 1:
        raise FederationError("the members' uploads have different tensors; one runs another version")
    return statements


def hash_vector(vector: verified.Vector) -> str:
    return sha256(b"fedvlm vector 1\n" + vector.tobytes()).hexdigest()


def layout_of(upload: Tensors) -> list[str]:
    """Describe the tensors of an upload, as "float32 4x16 head"."""
    shapes = {key: "x".join(map(str, upload[key].shape)) or "-" for key in upload}
    return [f"{str(upload[key].dtype).removeprefix('torch.')} {shapes[key]} {key}" for key in sorted(upload)]


def template_of_layout(layout: Sequence[str]) -> Tensors:
    """Return tensors of the layout that take no memory."""
    try:
        entries = [entry.split(" ", 2) for entry in layout]
        return {
            name: torch.zeros((), dtype=TYPES[dtype]).expand([int(size) for size in shape.split("x") if shape != "-"])
            for dtype, shape, name in entries
        }
    except (KeyError, ValueError, RuntimeError) as error:
        raise FederationError("a member's upload has tensors that cannot be summed; it runs another version") from error


def open_sum(
    vectors: Iterable[verified.Vector], layout: Sequence[str], is_total: bool
) -> tuple[Tensors, dict[str, float]]:
    """Return what all uploads add up to, and the summed scores."""
    template = template_of_layout(layout)
    extra = {verified.WEIGHT_KEY: torch.zeros(()), SCORES_KEY: torch.zeros(len(SCORE_NAMES))}
    sums = verified.unpack_integers(verified.add_vectors(vectors), {**template, **extra})
    scores = (sums[SCORES_KEY].double() / verified.FIXED_POINT_STEPS).tolist()
    return verified.decode_sum(sums, is_total, template), dict(zip(SCORE_NAMES, scores, strict=True))


def next_state(
    settings: Settings, before: Tensors, total: Tensors, members: Sequence[str], multi_label: bool = False
) -> Tensors:
    """Aggregate the sum, as every member and the server do; refuse a state beyond the bounds."""
    method = per_finding(settings.method) if multi_label else settings.method
    weights = torch.tensor([float(len(members))])
    after = method.aggregate(before, [total], weights, sorted(members))
    verified.check_state(settings.channel, method, before, after, len(members))
    return after


def initial_shared(method: Method, frozen: Frozen, members: int) -> Tensors:
    """Return the state before the first round."""
    shared, name = dict(method.init(frozen)[0]), method.traits.training.client_count
    return shared if name is None else {**shared, name: torch.full_like(shared[name], members)}


def read_ends(entries: Any, plan: Plan, state: Tensors) -> dict[str, EndStatement]:
    """Return what all members signed at the end, if it is this state."""
    ends = read_statements(EndStatement, entries, plan)
    if {end.state for end in ends.values()} != {hash_tensors(state)}:
        raise FederationError("the members have not signed this state at the end of the session; it is not used")
    if len({(end.session, end.previous) for end in ends.values()}) > 1:
        raise FederationError("the members have signed the ends of different sessions; they are not used")
    return ends


def is_total(settings: Settings) -> bool:
    return upload_sum(settings.method) == "total"


def check_same_state(own: Tensors, posted: Tensors) -> None:
    """Refuse a posted state that is not the own one up to what machines differ by."""
    if own.keys() != posted.keys():
        raise FederationError("the posted state has other tensors than the sum leads to; nothing leaves")
    for key, value in own.items():
        if not _is_same(value, posted[key]):
            raise FederationError(
                f"{key!r} of the posted state is not what the sum of all members leads to; the server made it up, or "
                "runs another version. Nothing leaves"
            )


def _is_same(own: Tensor, posted: Tensor) -> bool:
    if own.shape != posted.shape or own.dtype != posted.dtype:
        return False
    if not own.is_floating_point():
        return torch.equal(own, posted)
    a, b = own.double(), posted.double()
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(a[~finite], b[~finite]):
        return False
    a, b = a[finite], b[finite]
    return float((a - b).norm()) <= MAX_STATE_DIFFERENCE * float(a.norm())


def pair_keys(secret: bytes, agreements: Mapping[str, Agreement], name: str, bound: Sequence[Any]) -> dict[str, bytes]:
    """Return the mask key with every other member, bound to session, pair, purpose and what `bound` says."""
    private, out = X25519PrivateKey.from_private_bytes(secret), {}
    salt = bytes.fromhex(hash_statements(agreements))
    for peer, agreement in agreements.items():
        if peer != name:
            try:
                shared = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(agreement.key)))
            except ValueError as error:
                raise FederationError(f"the session key of {peer} is invalid; nothing leaves") from error
            info = hash_words("mask", sorted([name, peer]), *bound)
            out[peer] = verified.derive_key(shared, salt, info.encode())
    return out


def new_session_key() -> tuple[bytes, str]:
    """Return a private X25519 key and its public part in hexadecimal."""
    private = X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw().hex()


def to_vector(array: Any) -> verified.Vector:
    """Return a masked upload from a message; refuse other arrays."""
    array = np.asarray(array)
    if array.dtype != np.int64 or array.ndim != 1:
        raise FederationError("a masked upload must be one list of 64-bit integers")
    return np.ascontiguousarray(array).view(np.uint64)
