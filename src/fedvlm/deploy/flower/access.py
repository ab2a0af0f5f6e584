"""Who gets in at the port of a Flower process: its own kin with a secret, and sites with a key.

Flower serves its sites, its command line and its own processes at one port, and asks only the
sites for a key. Whoever may call the rest runs programs as the server's user. So nothing passes
but what is named here: a site's calls, signed by a key of this federation, and calls of processes
that can read the secret of a folder. The secret is what counts, not the address: behind a proxy
on the same machine, and for its other users, every caller looks local.
"""

import os
from base64 import b64decode
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from hmac import compare_digest
from hmac import new as hmac
from ipaddress import ip_address
from pathlib import Path
from secrets import token_hex
from typing import Any

from fedvlm.deploy.identity.certificates import SITES_FOLDER as CERTIFICATES
from fedvlm.deploy.identity.certificates import SiteCertificate, admitted_sites, current_certificate
from fedvlm.deploy.identity.keys import Signer, load_public_key
from fedvlm.errors import FedVLMError, SettingsError

TOKEN_FOLDER_VARIABLE = "FEDVLM_PASS"  # the variable that names the folder with the secret
SECRET_FILE = "control.key"  # the secret's file there
TOKEN_HEADER = "fedvlm-pass"
CONTROL_PREFIXES = ("/v1/control/", "/v1/runtime/")  # for Flower's command line, SuperExec and apps
SITE_PATHS = frozenset(
    f"/v1/fleet/{auth_token}"
    for auth_token in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
FORBIDDEN, UNAUTHORIZED = 403, 401  # Flower's SuperNode ends at once when it is told the second
TOO_LARGE = 413
MAX_CALL_BYTES = 64 << 20  # bytes of a site's call: Flower sends arrays in pieces of 5 MB
Scope = Mapping[str, Any]


def new_secret() -> bytes:
    return token_hex(32).encode()


def auth_token(folder: Path) -> str:
    """What kin show: not the secret itself, because Flower's SuperExec signs by that."""
    try:
        secret = (folder / SECRET_FILE).read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{folder / SECRET_FILE} cannot be read ({error}); only the user who owns the folder has a say there"
        ) from error
    return hmac(secret, b"fedvlm pass", sha256).hexdigest()


def attach_token() -> None:
    """From here on this process shows the word in each of its calls to Flower's other processes."""
    from flwr.supercore.protobuf.client import ProtobufClient

    token, send = auth_token(Path(os.environ[TOKEN_FOLDER_VARIABLE])), ProtobufClient._send

    def showing(self: Any, context: Any, **options: Any) -> Any:
        context.request.headers[TOKEN_HEADER] = token
        return send(self, context, **options)

    ProtobufClient._send = showing


def single_header(scope: Scope, name: str) -> bytes:
    """The header of this name; nothing if there are two, as others might read the other one."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return values[0] if len(values) == 1 else b""


class SiteKeys:
    """The certificates in `sites/` of the server's folder as they are now, without a restart.

    `enrol` is told of a key that is new here, `dismiss` of one that has ended.
    """

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
        """Whether the holder of a known key made this call; how old it is, Flower looks at."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        self.refresh(scope)
        try:
            key, certificate = self.certificates[b64decode(single_header(scope, "flwr-public-key"), validate=True)]
            signature = b64decode(single_header(scope, "flwr-signature"), validate=True)
            key.verify(signature, single_header(scope, "flwr-timestamp"), ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, KeyError, ValueError):
            return False
        return not certificate.invalid_reason

    def refresh(self, scope: Scope) -> None:
        """Reads the folder again if a file came, went or was replaced."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        snapshot = _folder_snapshot(self.folder / CERTIFICATES)
        if snapshot == self.snapshot:
            return
        certificates: dict[bytes, tuple[Any, SiteCertificate]] = {}
        form = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # as Flower's SuperNode sends it
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
    """What changes when any file does."""
    snapshot = set()
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            about = entry.stat()
            snapshot.add((entry.name, about.st_ino, about.st_size, about.st_mtime_ns))
    return snapshot


class AccessMiddleware:
    """An ASGI application around another; of a call that does not pass, the body is not read."""

    def __init__(self, app: Any, token: str, is_signed: Callable[[Scope], bool] = lambda scope: False) -> None:
        self.app, self.token, self.is_signed = app, token.encode(), is_signed

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif status := self.refusal_status(scope):
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body"})
        else:
            limited = limit_body(receive) if scope["path"] in SITE_PATHS else receive
            await self.app(scope, limited, send)

    def refusal_status(self, scope: Scope) -> int:
        """The answer to a call that does not pass, 0 to one that does."""
        path = scope["path"]
        if path in SITE_PATHS:
            if not self.is_signed(scope):
                return UNAUTHORIZED
            return TOO_LARGE if int(single_header(scope, "content-length") or 0) > MAX_CALL_BYTES else 0
        has_token = compare_digest(single_header(scope, TOKEN_HEADER), self.token)
        return 0 if path.startswith(CONTROL_PREFIXES) and is_local(scope) and has_token else FORBIDDEN


def limit_body(receive: Any) -> Any:
    """A body that does not say how long it is ends, too: all of it would be in memory."""
    read = 0

    async def part() -> Any:
        nonlocal read
        chunk = await receive()
        read += len(chunk.get("body", b""))
        return chunk if read <= MAX_CALL_BYTES else {"type": "http.disconnect"}

    return part


def is_local(scope: Scope) -> bool:
    """Whether the caller is on this machine, as far as can be seen."""
    try:
        return ip_address(scope["client"][0]).is_loopback
    except (KeyError, TypeError, ValueError):
        return False
