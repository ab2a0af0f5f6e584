"""Encode the messages between server and client, as Flower records and as bytes.

Torch is not imported here, so that a process that only forwards messages starts fast.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from time import monotonic, sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.engines.flower import import_flower
from fedvlm.errors import FederationError

Arrays = dict[str, NDArray[Any]]
POLL_SECONDS = 0.1  # seconds between looks for replies
SINGLE_RECORD_BYTES = 4 << 20  # bytes of arrays up to which a parcel travels in one piece
MAX_ARRAYS = 10_000  # arrays of a message; 300,000 empty ones would take half a minute and 1 GB


@dataclass(frozen=True)
class Message:
    """Hold a JSON header and named arrays; nothing else ever travels."""

    header: Mapping[str, Any]
    arrays: Arrays = field(default_factory=dict)


def checksum(message: Message) -> str:
    """Return the checksum of the header and of names, types, shapes and bytes of the arrays, whatever their order."""
    words = {key: value for key, value in message.header.items() if key not in SIGNATURE_FIELDS}
    total = sha256(json.dumps(words, sort_keys=True).encode())
    for name in sorted(message.arrays):
        array = np.asarray(message.arrays[name], order="C")
        total.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        total.update(array.tobytes())
    return total.hexdigest()


SIGNATURE_FIELDS = ("checksum", "signature")  # fields that protect a message and are not part of what they protect


def seal(message: Message) -> Message:
    """Return the message with the checksum that the other side verifies."""
    plain = json.loads(json.dumps(message.header))
    return Message({**plain, "checksum": checksum(Message(plain, message.arrays))}, message.arrays)


def unseal(message: Message, context: str) -> Message:
    """Refuse a message that differs by a bit from the sealed one."""
    if message.header.get("checksum") != checksum(message):
        raise FederationError(f"{context}: the message is damaged, its checksum is wrong; it is ignored")
    return message


def to_records(message: Message) -> Any:
    """Return Flower records: in one piece, as Flower requests each piece separately, or by arrays if it is large."""
    app = import_flower()
    if sum(np.asarray(array).nbytes for array in message.arrays.values()) <= SINGLE_RECORD_BYTES:
        return app.RecordDict({"parcel": app.ConfigRecord({"bytes": to_bytes(message)})})
    arrays = app.ArrayRecord({key: app.Array(np.asarray(v)) for key, v in message.arrays.items()})
    return app.RecordDict({"header": app.ConfigRecord({"json": json.dumps(message.header)}), "arrays": arrays})


def from_records(records: Any, context: str) -> Message:
    try:
        if "parcel" in records:
            message = from_bytes(records["parcel"]["bytes"])
        else:
            if len(records["arrays"]) > MAX_ARRAYS:
                raise ValueError(f"it has more than {MAX_ARRAYS} arrays")
            arrays = {key: value.numpy() for key, value in records["arrays"].items()}
            message = Message(json.loads(records["header"]["json"]), arrays)
        if not isinstance(message.header, dict):
            raise TypeError("its words are no table")
    except Exception as error:  # whatever the bytes of a stranger make numpy or JSON raise
        raise FederationError(
            f"{context}: the message cannot be read ({type(error).__name__}: {error}); it is ignored"
        ) from error
    return message


def read_context_state(context: Any, context_name: str) -> Message:
    """Return the state that a ClientApp keeps of this run."""
    return from_records(context.state, context_name) if context.state else Message({})


def collect_replies(
    grid: Any, ids: Iterable[str], seconds: float | None, is_complete: Callable[[], bool] = lambda: False
) -> Iterator[Any]:
    """Yield replies as they come, until all are there, or `is_complete`, or time is up."""
    waiting = set(ids)
    end = inf if seconds is None else monotonic() + seconds
    while waiting:
        over = monotonic() > end
        for message in grid.pull_messages(list(waiting)):
            waiting.discard(message.metadata.reply_to_message_id)
            yield message
        if not waiting or over or is_complete():
            return
        sleep(POLL_SECONDS)


def to_bytes(message: Message) -> bytes:
    from safetensors.numpy import save

    contiguous = {key: np.asarray(value, order="C") for key, value in message.arrays.items()}
    words = json.dumps([message.header, list(contiguous)])  # one string: more come in any order
    return save(contiguous, metadata={"header": words})


def from_bytes(data: bytes, max_arrays: float = MAX_ARRAYS) -> Message:
    """Return the message; refuse one with too many arrays before it is parsed."""
    from safetensors.numpy import load

    size = int.from_bytes(data[:8], "little")
    if data.count(b"{", 8, 8 + size) > max_arrays:  # each array has one, and so has each table in the header
        raise ValueError(f"it has more than {max_arrays} arrays")
    header, names = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["header"])
    arrays = load(data)  # in an order of its own
    if sorted(names) != sorted(arrays):
        raise FederationError("the names of its arrays do not match its header")
    return Message(header, {name: arrays[name] for name in names})
