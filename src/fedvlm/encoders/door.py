"""The door of the encoder server: how many may stand in it, and for how long without a word."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 128  # at once; the one that has kept us waiting longest makes room for a new one
HEADER_SECONDS = 10.0  # from the first byte, or from connecting, to the end of a request's header


class Door(H11Protocol):
    """HTTP as uvicorn speaks it, without patience for connections that ask nothing."""

    connections_most, header_seconds = CONNECTIONS, HEADER_SECONDS
    waits: asyncio.TimerHandle | None = None  # runs while no request is being answered

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.connections_most:
            silent = [one for one in self.connections if isinstance(one, Door) and one.waits]
            # if all are at work, the new one is the silent one, and goes
            min(silent, key=lambda one: one.waits.when() if one.waits else 0.0).leave()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def leave(self) -> None:
        self._forget()
        self.connections.discard(self)
        self.transport.abort()

    def _watch(self) -> None:
        """Between two requests uvicorn's own limit holds, until the first byte of the second."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self.waits is None and not self.transport.is_closing():
            self.waits = self.loop.call_later(self.header_seconds, self.leave)

    def _forget(self) -> None:
        if self.waits is not None:
            self.waits.cancel()
            self.waits = None
