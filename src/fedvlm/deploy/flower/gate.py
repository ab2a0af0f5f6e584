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

from fedvlm.deploy.keys import Signer, public_key
from fedvlm.deploy.membership import SITES as CERTIFICATES
from fedvlm.deploy.membership import Membership, member, sites
from fedvlm.errors import FedVLMError, SettingsError

PASS = "FEDVLM_PASS"  # the variable that names the folder with the secret
NAME = "control.key"  # the secret's file there
HEADER = "fedvlm-pass"
OWN = ("/v1/control/", "/v1/runtime/")  # for Flower's command line, SuperExec and apps
SITES = frozenset(
    f"/v1/fleet/{word}"
    for word in (
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
CLOSED, UNKNOWN = 403, 401  # Flower's SuperNode ends at once when it is told the second
LONG = 413
MOST = 64 << 20  # bytes of a site's call: Flower sends arrays in pieces of 5 MB
Scope = Mapping[str, Any]


def new_secret() -> bytes:
    return token_hex(32).encode()


def word(folder: Path) -> str:
    """What kin show: not the secret itself, because Flower's SuperExec signs by that."""
    try:
        secret = (folder / NAME).read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{folder / NAME} cannot be read ({error}); only the user who owns the folder has a "
            "say there"
        ) from error
    return hmac(secret, b"fedvlm pass", sha256).hexdigest()


def carry() -> None:
    """From here on this process shows the word in each of its calls to Flower's other processes."""
    from flwr.supercore.protobuf.client import ProtobufClient

    shown, send = word(Path(os.environ[PASS])), ProtobufClient._send

    def showing(self: Any, context: Any, **options: Any) -> Any:
        context.request.headers[HEADER] = shown
        return send(self, context, **options)

    ProtobufClient._send = showing


def only(scope: Scope, name: str) -> bytes:
    """The header of this name; nothing if there are two, as others might read the other one."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return values[0] if len(values) == 1 else b""


class Keys:
    """The certificates in `sites/` of the server's folder as they are now, without a restart.

    `enrol` is told of a key that is new here, `dismiss` of one that has ended.
    """

    def __init__(
        self,
        folder: Path,
        enrol: Callable[[Scope, bytes], None],
        dismiss: Callable[[Scope, bytes], None] = lambda scope, key: None,
    ) -> None:
        self.folder, self.enrol, self.dismiss = folder, enrol, dismiss
        self.server = Signer(folder / "signing.key").public
        self.seen: Any = None
        self.known: dict[bytes, tuple[Any, Membership]] = {}

    def __call__(self, scope: Scope) -> bool:
        """Whether the holder of a known key made this call; how old it is, Flower looks at."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        self.refresh(scope)
        try:
            key, one = self.known[b64decode(only(scope, "flwr-public-key"), validate=True)]
            signature = b64decode(only(scope, "flwr-signature"), validate=True)
            key.verify(signature, only(scope, "flwr-timestamp"), ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, KeyError, ValueError):
            return False
        return not one.ended

    def refresh(self, scope: Scope) -> None:
        """Reads the folder again if a file came, went or was replaced."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        there = _files(self.folder / CERTIFICATES)
        if there == self.seen:
            return
        known: dict[bytes, tuple[Any, Membership]] = {}
        form = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # as Flower's SuperNode sends it
        for name in sites(self.folder):
            try:
                one = member(self.folder, name)
            except FedVLMError:  # it is being written, or went, or this server never signed it
                continue
            key = public_key(one.key.encode())
            known[key.public_bytes(*form)] = (key, one)
        for new in known.keys() - self.known.keys():
            self.enrol(scope, new)
        for old in self.known.keys() - known.keys():
            self.dismiss(scope, old)
        self.known, self.seen = known, there


def _files(folder: Path) -> set[tuple[str, int, int, int]]:
    """What changes when any file does."""
    found = set()
    for one in os.scandir(folder):
        with suppress(FileNotFoundError):
            about = one.stat()
            found.add((one.name, about.st_ino, about.st_size, about.st_mtime_ns))
    return found


class Gate:
    """An ASGI application around another; of a call that does not pass, the body is not read."""

    def __init__(
        self, app: Any, word: str, signed: Callable[[Scope], bool] = lambda scope: False
    ) -> None:
        self.app, self.word, self.signed = app, word.encode(), signed

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif status := self.refused(scope):
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body"})
        else:
            limited = short(receive) if scope["path"] in SITES else receive
            await self.app(scope, limited, send)

    def refused(self, scope: Scope) -> int:
        """The answer to a call that does not pass, 0 to one that does."""
        path = scope["path"]
        if path in SITES:
            if not self.signed(scope):
                return UNKNOWN
            return LONG if int(only(scope, "content-length") or 0) > MOST else 0
        kin = compare_digest(only(scope, HEADER), self.word)
        return 0 if path.startswith(OWN) and local(scope) and kin else CLOSED


def short(receive: Any) -> Any:
    """A body that does not say how long it is ends, too: all of it would be in memory."""
    read = 0

    async def part() -> Any:
        nonlocal read
        one = await receive()
        read += len(one.get("body", b""))
        return one if read <= MOST else {"type": "http.disconnect"}

    return part


def local(scope: Scope) -> bool:
    """Whether the caller is on this machine, as far as can be seen."""
    try:
        return ip_address(scope["client"][0]).is_loopback
    except (KeyError, TypeError, ValueError):
        return False
