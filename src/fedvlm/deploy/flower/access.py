"""Control access to the port of a server's SuperLink: sites by their keys, and nobody else.

Flower serves sites, its command line and its own processes at one port, and asks only sites for a key. Whoever may call
the rest runs programs as the server's user. So only calls of the routes that a site needs pass, signed by a key of this
federation; the server itself uses no route (`fedvlm.deploy.flower.server`).
"""

import asyncio
import os
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedvlm.deploy.identity.certificates import SITES_FOLDER as CERTIFICATES
from fedvlm.deploy.identity.certificates import SiteCertificate, admitted_sites, current_certificate, record_contact
from fedvlm.deploy.identity.keys import SIGNATURE_SCHEME, Signer, load_public_key
from fedvlm.errors import FedVLMError

PULL_PATH = "/v1/fleet/pull-messages"
SITE_PATHS = frozenset(
    {
        PULL_PATH,
        "/v1/fleet/activate-node",
        "/v1/fleet/deactivate-node",
        "/v1/fleet/send-node-heartbeat",
        "/v1/fleet/push-messages",
        "/v1/fleet/push-object",
        "/v1/fleet/pull-object",
        "/v1/fleet/confirm-message-received",
    }
)
FORBIDDEN, UNAUTHORIZED = 403, 401
NOT_FOUND, LENGTH_REQUIRED, TOO_LARGE, UNAVAILABLE = 404, 411, 413, 503
REFUSAL_REASONS = {
    FORBIDDEN: "not open to outsiders",
    UNAUTHORIZED: "not signed by the key of an admitted site",
    LENGTH_REQUIRED: "of unknown length",
    TOO_LARGE: "too large",
    UNAVAILABLE: "too much at once",
}
OBJECT_PATH = "/v1/fleet/push-object"
MAX_OBJECT_BYTES = 64 << 20  # bytes of a call with an object: Flower sends arrays in pieces of 5 MB
MAX_CALL_BYTES = 1 << 20  # bytes of any other call; of a message that is a list of 14,000 objects
MAX_TOTAL_BYTES = 512 << 20  # bytes of all calls that are being read; one site has MAX_OBJECT_BYTES of them
ADMIT_EXTENSION = "fedvlm.admit"  # the ASGI extension that admits the connection of an allowed call
HOLD_SECONDS = 4.0  # that a site's request for messages waits for one, so that it need not ask many times a second
Scope = Mapping[str, Any]


def single_header(scope: Scope, name: str) -> bytes:
    """Return the header of this name, or nothing if it is given twice: others might read the second one."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return values[0] if len(values) == 1 else b""


class SiteKeys:
    """Hold the certificates in `sites/` of the server's folder as they are now, without a restart."""

    def __init__(
        self,
        folder: Path,
        register_node: Callable[[Scope, bytes], None],
        deactivate_node: Callable[[Scope, bytes], None] = lambda scope, key: None,
    ) -> None:
        self.folder, self.register_node, self.deactivate_node = folder, register_node, deactivate_node
        self.server = Signer(folder / "signing.key").public
        self.snapshot: Any = None
        self.certificates: dict[bytes, tuple[Any, SiteCertificate]] = {}

    def __call__(self, scope: Scope) -> bool:
        """Return whether the holder of a known key made this call; Flower checks its age."""
        self.refresh(scope)
        try:
            key, certificate = self.certificates[b64decode(single_header(scope, "flwr-public-key"), validate=True)]
            signature = b64decode(single_header(scope, "flwr-signature"), validate=True)
            key.verify(signature, single_header(scope, "flwr-timestamp"), SIGNATURE_SCHEME)
        except (InvalidSignature, KeyError, ValueError):
            return False
        if not certificate.invalid_reason:
            record_contact(self.folder, certificate.site)
        return not certificate.invalid_reason

    def refresh(self, scope: Scope) -> None:
        """Read the folder again if a file was added, removed or replaced."""
        snapshot = _folder_snapshot(self.folder / CERTIFICATES)
        if snapshot == self.snapshot:
            return
        certificates: dict[bytes, tuple[Any, SiteCertificate]] = {}
        form = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # as a site sends it
        for name in admitted_sites(self.folder):
            try:
                certificate = current_certificate(self.folder, name)
            except FedVLMError:  # it is being written, or went, or this server never signed it
                continue
            key = load_public_key(certificate.key.encode())
            certificates[key.public_bytes(*form)] = (key, certificate)
        for new in certificates.keys() - self.certificates.keys():
            self.register_node(scope, new)
        for old in self.certificates.keys() - certificates.keys():
            self.deactivate_node(scope, old)
        self.certificates, self.snapshot = certificates, snapshot


def _folder_snapshot(folder: Path) -> set[tuple[str, int, int, int]]:
    """Return a value that changes when any file does."""
    snapshot = set()
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            about = entry.stat()
            snapshot.add((entry.name, about.st_ino, about.st_size, about.st_mtime_ns))
    return snapshot


class NewMessages:
    """Wake the requests that wait for messages, from any thread."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    def announce(self) -> None:
        if self.loop is not None:
            with suppress(RuntimeError):  # the server stops
                self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        event, self.event = self.event, asyncio.Event()
        event.set()

    def hold_empty(self, send: Any) -> Any:
        """Return `send` for a request for messages: the answer that there are none waits for some."""
        if self.loop is not (loop := asyncio.get_running_loop()):
            self.loop, self.event = loop, asyncio.Event()
        event = self.event

        async def held(message: Any) -> None:
            is_start = message["type"] == "http.response.start" and message["status"] == 200
            if is_start and (b"content-length", b"0") in message["headers"]:
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), HOLD_SECONDS)
            await send(message)

        return held


class AccessMiddleware:
    """Wrap an ASGI application; the body of a refused call is not read."""

    def __init__(
        self,
        app: Any,
        is_signed: Callable[[Scope], bool],
        new_messages: NewMessages,
        log_refusal: Callable[[str, str, str], None] = lambda source, target, reason: None,
    ) -> None:
        self.app, self.is_signed, self.new_messages, self.log_refusal = app, is_signed, new_messages, log_refusal
        self.bytes_by_key: Counter[bytes] = Counter()  # of calls that are being read and answered

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif status := self.refusal_status(scope):
            self.log_refusal(str((scope.get("client") or ["?"])[0]), scope["path"], REFUSAL_REASONS[status])
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body"})
        else:
            scope.get("extensions", {}).get(ADMIT_EXTENSION, lambda: None)()
            key, size = single_header(scope, "flwr-public-key"), content_length(scope)
            if scope["path"] == OBJECT_PATH:
                send = refuse_unasked(send)
            elif scope["path"] == PULL_PATH:
                send = self.new_messages.hold_empty(send)
            self.bytes_by_key[key] += size
            try:
                await self.app(scope, receive, send)
            finally:
                self.bytes_by_key[key] -= size

    def refusal_status(self, scope: Scope) -> int:
        """Return the HTTP status of a refused call, 0 of an allowed one."""
        if scope["path"] not in SITE_PATHS:
            return FORBIDDEN
        return self.size_status(scope) if self.is_signed(scope) else UNAUTHORIZED

    def size_status(self, scope: Scope) -> int:
        """Return the HTTP status of a body that is too large, or whose length nobody knows; 0 of any other."""
        if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
            return LENGTH_REQUIRED
        size = content_length(scope)
        if size > (MAX_OBJECT_BYTES if scope["path"] == OBJECT_PATH else MAX_CALL_BYTES):
            return TOO_LARGE
        of_site = self.bytes_by_key[single_header(scope, "flwr-public-key")]
        is_full = of_site + size > MAX_OBJECT_BYTES or self.bytes_by_key.total() + size > MAX_TOTAL_BYTES
        return UNAVAILABLE if is_full else 0


def refuse_unasked(send: Any) -> Any:
    """Return `send` for a call with an object: 404 if no message has announced it, where Flower answers 200."""

    async def refusing(message: Any) -> None:
        is_start = message["type"] == "http.response.start" and message["status"] == 200
        is_unasked = is_start and (b"content-length", b"0") in message["headers"]  # `stored` is false
        await send({**message, "status": NOT_FOUND} if is_unasked else message)

    return refusing


def content_length(scope: Scope) -> int:
    return int(single_header(scope, "content-length") or 0)
