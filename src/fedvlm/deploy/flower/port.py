"""Bound what a caller takes from the server before its call is parsed: connections, header, time and body.

Flower serves by uvicorn, which bounds none of these. A connection is pending until the access control allows one of its
calls. An address has a few pending connections; one more ends the oldest of them. So nobody locks out others who share
the address, as behind a proxy.
"""

import os
import socket
from asyncio import TimerHandle, Transport
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedvlm.deploy.flower.access import ADMIT_EXTENSION
from fedvlm.deploy.identity.keys import read_passphrase

MAX_HEADER_BYTES = 16 << 10
HEADER_SECONDS = 10.0  # seconds from the first byte of a call, or from the connection, to the end of the header
BODY_SECONDS = 20.0  # seconds that any body has, and one more for each ...
MIN_BODY_RATE = 16 << 10  # ... of these bytes
MAX_PENDING_PER_ADDRESS = 32
MAX_CONNECTIONS = 512  # a TLS connection takes about 300 kB
CLOSE_SECONDS = 1.0  # seconds to read why a call was refused
HEADER_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
Peer = tuple[str, int]


class Connections:
    """Hold the open connections, oldest first."""

    def __init__(self) -> None:
        self.pending: dict[Peer, socket.socket] = {}
        self.admitted: dict[Peer, socket.socket] = {}

    def add(self, peer: Peer, connection: socket.socket) -> bool:
        """Return whether there is room for a connection, if need be after ending the oldest pending one."""
        for table in (self.pending, self.admitted):
            for closed in [peer for peer, known in table.items() if known.fileno() < 0]:
                del table[closed]
        of_address = [known for known in self.pending if known[0] == peer[0]]
        if len(of_address) >= MAX_PENDING_PER_ADDRESS:
            self._end(of_address[0])
        elif len(self.pending) + len(self.admitted) >= MAX_CONNECTIONS:
            if not self.pending:
                return False
            self._end(next(iter(self.pending)))
        self.pending[peer] = connection
        return True

    def _end(self, peer: Peer) -> None:
        with suppress(OSError):
            self.pending.pop(peer).shutdown(socket.SHUT_RDWR)  # its transport reads the end and closes

    def admit(self, peer: Peer) -> None:
        if peer in self.pending:
            self.admitted[peer] = self.pending.pop(peer)


CONNECTIONS = Connections()


class BoundedListener(socket.socket):
    """Accept connections while there is room, before TLS takes memory for them."""

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if not CONNECTIONS.add(address[:2], connection):
            connection.close()
            raise ConnectionAbortedError  # asyncio then waits for the next one
        return connection, address


class BoundedProtocol(HttpToolsProtocol):
    """End a call whose header is too long or late, whose body is too slow, or that does not wait for an answer."""

    timer: TimerHandle | None = None
    header_bytes = 0
    reads_header = True
    is_refused = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_seconds(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit_seconds(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self.is_refused and not self.transport.is_closing():
            if self.reads_header and not self.header_bytes:
                self._limit_seconds(HEADER_SECONDS)
            size = MAX_HEADER_BYTES - self.header_bytes if self.reads_header else len(data)
            part, data = data[:size], data[size:]
            self.header_bytes += len(part)
            super().data_received(part)
            if self.reads_header and self.header_bytes >= MAX_HEADER_BYTES:
                self.is_refused = True
                self.transport.pause_reading()  # the connection stays for a moment, so that the caller can read why
                self.transport.write(HEADER_TOO_LARGE)
                self._limit_seconds(CLOSE_SECONDS)

    def on_message_begin(self) -> None:
        if self.pipeline:  # one call may come before uvicorn knows that it has written all of the last answer
            raise ValueError("calls come before the answers to the last ones")  # uvicorn answers 400
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.reads_header = False
        admit: Any = partial(CONNECTIONS.admit, cast(Peer, self.client))
        self.scope["extensions"] = {ADMIT_EXTENSION: admit}
        lengths = [value for name, value in self.headers if name == b"content-length"]
        self._limit_seconds(BODY_SECONDS + sum(map(int, lengths)) / MIN_BODY_RATE)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.reads_header, self.header_bytes = True, 0
        self._limit_seconds(None)
        super().on_message_complete()

    def _limit_seconds(self, seconds: float | None) -> None:
        """End the connection after this time unless it is set anew."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def create_server(app: Any, host: str, port: int, **options: Any) -> tuple[uvicorn.Server, BoundedListener]:
    """Return a server within the bounds and its socket; strangers write no line to its log."""
    if b"ENCRYPTED" in Path(options.get("ssl_keyfile", os.devnull)).read_bytes():
        options["ssl_keyfile_password"] = read_passphrase(options["ssl_keyfile"]).decode()
    bounds = {"http": BoundedProtocol, "loop": "asyncio", "ws": "none", "access_log": False, "log_level": "error"}
    listener = BoundedListener(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return uvicorn.Server(uvicorn.Config(app, host=host, port=port, **{**options, **bounds})), listener


def serve(app: Any, **options: Any) -> None:
    """Take the place of `uvicorn.run`."""
    server, listener = create_server(app, **options)
    with listener:
        server.run([listener])
