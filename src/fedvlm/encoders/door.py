"""The door of the encoder server: how many may stand in it, and for how long without a word."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 128  # at once; the one that has kept us waiting longest makes room for a new one
HEADER_SECONDS = 10.0  # from the first byte, or from connecting, to the end of a request's header


class LimitedH11Protocol(H11Protocol):
    """HTTP as uvicorn speaks it, without patience for connections that ask nothing."""

    max_connections, header_seconds = MAX_CONNECTIONS, HEADER_SECONDS
    idle_timer: asyncio.TimerHandle | None = None  # runs while no request is being answered

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._update_timer()
        if len(self.connections) > self.max_connections:
            silent = [
                connection
                for connection in self.connections
                if isinstance(connection, LimitedH11Protocol) and connection.idle_timer
            ]
            # if all are at work, the new one is the silent one, and goes
            min(
                silent, key=lambda connection: connection.idle_timer.when() if connection.idle_timer else 0.0
            ).abort_connection()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def abort_connection(self) -> None:
        self._cancel_timer()
        self.connections.discard(self)
        self.transport.abort()

    def _update_timer(self) -> None:
        """Between two requests uvicorn's own limit holds, until the first byte of the second."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timer()
        elif self.idle_timer is None and not self.transport.is_closing():
            self.idle_timer = self.loop.call_later(self.header_seconds, self.abort_connection)

    def _cancel_timer(self) -> None:
        if self.idle_timer is not None:
            self.idle_timer.cancel()
            self.idle_timer = None
