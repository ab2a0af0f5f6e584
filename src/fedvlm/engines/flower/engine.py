"""The same verbs through Flower's messages: the server's side.

A client answers with what it uploads, its scores, and a number for the version of its `local`
tensors; these stay with it, in its Context.state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from secrets import token_hex
from typing import Any

from fedvlm.core import Tensors
from fedvlm.engines.client import Answers, Done, Kept, Local, Task
from fedvlm.engines.flower.client import arrays, unpack
from fedvlm.engines.flower.wire import Parcel, collect, from_records, seal, to_records, unseal
from fedvlm.errors import FederationError

LATE = 10.0  # seconds after the deadline until Flower forgets a message
KINDS = {"open": "query", "round": "train", "adapt": "train"}  # Flower's words for ours


class Flower:
    """Sends tasks through a grid; who does not answer in time is left out above the quorum."""

    def __init__(
        self,
        grid: Any,
        nodes: Mapping[str, int],
        training: str,
        quorum: float = 1.0,  # share of the clients asked that must answer
        deadline: float | None = None,  # seconds; None waits for ever
        secure: bool = False,  # uploads come as a sum, by SecAgg+
    ) -> None:
        self.grid = grid
        self.nodes = dict(nodes)  # by client id
        self.training = training
        self.quorum = quorum
        self.deadline = deadline
        self.secure = secure
        self.rows: dict[str, int] = {}  # that each client trains on
        self.absent: dict[str, str] = {}  # why a client has no node, if it is known
        self.missing: dict[str, str] = {}  # who did not answer the last time, and why

    def round(self, number: int, tasks: Sequence[Task]) -> Answers:
        return self._ask("round", number, tasks)

    def adapt(self, number: int, tasks: Sequence[Task]) -> Answers:
        return self._ask("adapt", number, tasks)

    def close(self) -> None:
        pass

    def version(self, id: str, local: Local) -> int:
        assert isinstance(local, Kept), f"the local tensors of {id} are with it, not here"
        return local.version

    def local(self, id: str, version: int) -> Local:
        """What stands for a client's local tensors at the server."""
        return Kept(version)

    def seal(self, parcel: Parcel) -> Parcel:
        return seal(parcel)

    def unseal(self, parcel: Parcel, id: str, where: str) -> Parcel:
        return unseal(parcel, where)

    def check(self, parcel: Parcel, id: str, request: Parcel) -> None:
        """Refuses a reply that no sound client sends; in one process they are all sound."""

    def reason(self, said: Any) -> str:
        """An error of a client, as the record may have it."""
        return str(said)

    def _ask(self, kind: str, number: int, tasks: Sequence[Task]) -> Answers:
        parcels = {
            task.id: Parcel(
                {
                    "kind": kind,
                    "training": self.training,
                    "round": number,
                    "client": task.id,
                    "trains": task.trains,
                    "version": self.version(task.id, task.local),
                    "held": [] if task.held is None else [self.version(task.id, task.held)],
                },
                arrays(task.sent),
            )
            for task in tasks
        }
        hidden = {task.id for task in tasks if task.trains and self.secure and kind == "round"}
        self.missing, total = {}, None
        replies = self.exchange({id: parcels[id] for id in parcels if id not in hidden}, number)
        if hidden:
            masked, total = self.exchange_masked({id: parcels[id] for id in hidden}, number)
            replies |= masked
        done = {}
        for id, reply in replies.items():
            about = reply.about
            upload = unpack(reply.arrays) if about["uploads"] else None
            local = self.local(id, about["version"])
            done[id] = Done(
                upload,
                local,
                about["scores"],
                self.rows[id],
                about["described"],
                passed=True,
                releases=about.get("releases", 0),
            )
        return Answers(done, dict(self.missing), total, self._least(len(parcels)))

    def exchange(self, parcels: Mapping[str, Parcel], number: int) -> dict[str, Parcel]:
        """Sends each client its parcel and returns the replies that fit; too few are an error."""
        sealed = self._sealed(parcels)
        asked: dict[str, tuple[str, Parcel]] = {}
        there = list(sealed)
        messages = [self._message(sealed[id], self.nodes[id], number) for id in there]
        for id, sent in zip(there, self.grid.push_messages(messages), strict=True):
            if sent is None:
                self.missing[id] = "the server's SuperLink did not take the message"
            else:
                asked[sent] = (id, sealed[id])
        replies: dict[str, Parcel] = {}

        def enough() -> bool:
            return self.enough({id for id, _ in asked.values()})

        for message in collect(self.grid, list(asked), self.deadline, enough):
            id, request = asked.pop(message.metadata.reply_to_message_id)
            with self._forgiving(id, request):
                replies[id] = self._accept(message, id, request)
        for id, _ in asked.values():
            self.missing[id] = self.left(id) or f"it did not answer within {self.deadline:g} s"
        self._count(parcels, replies, number)
        return {id: replies[id] for id in parcels if id in replies}

    def enough(self, waiting: set[str]) -> bool:
        """Whether none of these is worth waiting for."""
        return False

    def left(self, id: str) -> str:
        """Why a client is no longer one of those that count, or nothing."""
        return ""

    def exchange_masked(
        self, parcels: Mapping[str, Parcel], number: int
    ) -> tuple[dict[str, Parcel], Tensors]:
        """The same for clients whose uploads only their sum is seen of."""
        from fedvlm.engines.flower.secure import FEWEST, MOST_MEMBERS, exchange

        largest = max(self.rows[id] for id in parcels)
        notice = {
            id: Parcel({**one.about, "largest": largest}, one.arrays) for id, one in parcels.items()
        }
        sealed = self._sealed(notice)
        if not FEWEST <= len(sealed) <= MOST_MEMBERS:
            raise FederationError(
                f"round {number}: a secure sum hides a client among others, and takes three to a "
                f"thousand; {len(sealed)} are there. Set channel.secure = false, or change fraction"
            )
        came = exchange(
            self.grid, {self.nodes[id]: one for id, one in sealed.items()}, number, self.deadline
        )
        replies = {}
        for id, request in sealed.items():
            words = came.words.get(self.nodes[id])
            if words is None:
                why = self.left(id) or self.reason(came.why(self.nodes[id]))
                self.missing[id] = f"client {id}, round {number}: {why}"
                continue
            with self._forgiving(id, request):  # its masked upload is in the sum all the same
                replies[id] = self._fitting(Parcel(words), id, request)
        self._count(parcels, replies, number)
        if not replies:
            raise FederationError(f"round {number}: nobody's upload is in the secure sum")
        return replies, unpack(came.mean)

    def _sealed(self, parcels: Mapping[str, Parcel]) -> dict[str, Parcel]:
        """Requests to the clients that are there, each with a number that its reply must name."""
        for id in parcels.keys() - self.nodes.keys():
            self.missing[id] = self.absent.get(id, "it is not connected")
        return {
            id: self.seal(Parcel({**one.about, "nonce": token_hex(16)}, one.arrays))
            for id, one in parcels.items()
            if id in self.nodes
        }

    def _message(self, parcel: Parcel, node: int, number: int) -> Any:
        ttl = None if self.deadline is None else self.deadline + LATE
        return self.grid.create_message(
            to_records(parcel), KINDS[parcel.about["kind"]], node, str(number), ttl
        )

    def _accept(self, message: Any, id: str, request: Parcel) -> Parcel:
        """The reply as a parcel, if it is whole, from this client, and to this very request."""
        where = _where(id, request)
        if message.has_error():
            why = self.left(id) or self.reason(message.error.reason)
            raise FederationError(f"{where}: {why}")
        return self._fitting(from_records(message.content, where), id, request)

    def _fitting(self, parcel: Parcel, id: str, request: Parcel) -> Parcel:
        where = _where(id, request)
        parcel = self.unseal(parcel, id, where)
        if "error" in parcel.about:
            raise FederationError(f"{where}: {self.reason(parcel.about['error'])}")
        for key in ("kind", "training", "round", "nonce"):
            if parcel.about.get(key) != request.about[key]:
                raise FederationError(
                    f"{where}: the reply is to another request (its {key} is "
                    f"{str(parcel.about.get(key))[:80]!r}, not {request.about[key]!r}); it is left "
                    "out"
                )
        if parcel.about.get("client") != id and request.about["kind"] != "open":
            raise FederationError(f"{where}: the reply is another client's")
        try:
            self.check(parcel, id, request)
        except FederationError as error:
            raise FederationError(f"{where}: {error}") from error
        return parcel

    @contextmanager
    def _forgiving(self, id: str, request: Parcel) -> Iterator[None]:
        """Whatever is wrong with one client's reply, that client is missing and no other."""
        try:
            yield
        except FederationError as error:
            self.missing[id] = str(error)
        except Exception as error:
            why = f"its reply cannot be used ({type(error).__name__}); it is left out"
            self.missing[id] = f"{_where(id, request)}: {why}"

    def _least(self, asked: int) -> int:
        return ceil(self.quorum * asked - 1e-9)

    def _count(self, parcels: Iterable[str], replies: Mapping[str, Any], number: int) -> None:
        asked = len(list(parcels))
        least = self._least(asked)
        if len(replies) < least:
            why = "\n".join(f"  {id}: {reason}" for id, reason in sorted(self.missing.items()))
            raise FederationError(
                f"round {number}: {len(replies)} of {asked} clients answered, and {least} must "
                f"(quorum {self.quorum:g}); the run can be resumed once they are back\n{why}"
            )


def _where(id: str, request: Parcel) -> str:
    return id if request.about["kind"] == "open" else f"client {id}, round {request.about['round']}"
