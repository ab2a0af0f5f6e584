"""Create and use the keys, TLS certificates and signatures of a federation.

TLS proves that a site talks to its server; signatures prove that the holder of the server's or a site's folder made a
message, whoever may reach the port.
"""

import ipaddress
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedvlm.engines.flower.messages import Message, checksum
from fedvlm.errors import FederationError, SettingsError

CERTIFICATE_DAYS = 365  # a certificate lasts
ROOT_CERTIFICATE_DAYS = 3650  # and the root that the server's are made by: sites need no new one meanwhile
ROOT_NAME = "fedvlm federation"
MESSAGE_PREFIX = b"fedvlm parcel\n"  # so that no other signature of the same key fits


def _require_cryptography() -> Any:
    try:
        import cryptography
    except ImportError as error:
        raise SettingsError("certificates need the package cryptography; pip install 'fedvlm[flower]'") from error
    return cryptography


def create_certificates(host: str, start: datetime | None = None, days: int = CERTIFICATE_DAYS) -> dict[str, bytes]:
    """Create a root certificate with its key, and the server's certificate signed by it."""
    _require_cryptography()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    start = start or _backdated_now()
    root = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(root.public_key())
    ca = _certificate_builder(ROOT_NAME, root.public_key(), start, ROOT_CERTIFICATE_DAYS, authority=True)
    ca = ca.add_extension(usage, critical=True).add_extension(identifier, critical=False)
    papers = {"ca.crt": ca.sign(root, hashes.SHA256()).public_bytes(_pem()), "ca.key": _private_pem(root)}
    return papers | create_server_certificate(host, papers["ca.key"], start, days)


def create_server_certificate(
    host: str, ca_key: bytes, start: datetime | None = None, days: int = CERTIFICATE_DAYS
) -> dict[str, bytes]:
    """Create a key and a certificate for the server, signed by the root that its sites know."""
    _require_cryptography()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    root: Any = load_pem_private_key(ca_key, None)
    server_key = ec.generate_private_key(ec.SECP256R1())
    loopback_names = {"localhost", "127.0.0.1", "::1"}  # the server's own processes reach it there
    names = x509.SubjectAlternativeName([_alternative_name(name) for name in sorted({host, *loopback_names})])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key())
    paper = _certificate_builder(host, server_key.public_key(), start or _backdated_now(), days, authority=False)
    paper = paper.add_extension(names, critical=False).add_extension(issuer, critical=False)
    return {
        "server.pem": paper.sign(root, hashes.SHA256()).public_bytes(_pem()),
        "server.key": _private_pem(server_key),
    }


def _certificate_builder(word: str, key: Any, start: datetime, days: int, authority: bool) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    builder = x509.CertificateBuilder().subject_name(named(word)).issuer_name(named(ROOT_NAME))
    builder = builder.public_key(key).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(start).not_valid_after(start + timedelta(days=days))
    length = 0 if authority else None
    return builder.add_extension(x509.BasicConstraints(authority, length), critical=True)


def _backdated_now() -> datetime:
    """Return a time a little ago, for slow clocks."""
    return datetime.now(UTC) - timedelta(hours=1)


def _pem() -> Any:
    from cryptography.hazmat.primitives import serialization

    return serialization.Encoding.PEM


def _private_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    form = serialization.PrivateFormat.PKCS8
    return bytes(key.private_bytes(_pem(), form, serialization.NoEncryption()))


def certificate_expiry(path: Path) -> datetime:
    """Return when a TLS certificate expires."""
    _require_cryptography()
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} is not a certificate ({error}); restore the folder") from error


def _alternative_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def create_key_pair() -> tuple[bytes, bytes]:
    """Create an elliptic-curve key pair as Flower's node authentication needs it: private and public part."""
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    return private, _openssh(key.public_key())


def _openssh(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    form = serialization.PublicFormat.OpenSSH
    return bytes(key.public_bytes(serialization.Encoding.OpenSSH, form))


def load_public_key(data: bytes) -> Any:
    """Load a public key of the kind that `create_key_pair` makes; raise ValueError for any other."""
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(data)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise ValueError("a key of another type than fedvlm creates")
    if _openssh(key) != data:
        raise ValueError("more than a key")
    return key


class Signer:
    """Sign messages with a private key file."""

    def __init__(self, path: Path, prefix: bytes = MESSAGE_PREFIX) -> None:
        _require_cryptography()
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        self.prefix = prefix
        try:
            self.key: Any = load_ssh_private_key(path.read_bytes(), None)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"{path} is not a private key ({error}); restore the folder as fedvlm wrote it"
            ) from error

    @property
    def public(self) -> bytes:
        return _openssh(self.key.public_key())

    def __call__(self, message: Message) -> Message:
        """Return the message with a checksum and a signature over it."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        digest = checksum(message)
        signature = self.key.sign(self.prefix + digest.encode(), ec.ECDSA(hashes.SHA256()))
        words = {"checksum": digest, "signature": b64encode(signature).decode()}
        return Message({**message.header, **words}, message.arrays)


class Verifier:
    """Verify messages by a public key, or a file with one."""

    def __init__(self, source: Path | bytes, prefix: bytes = MESSAGE_PREFIX) -> None:
        self.prefix = prefix
        try:
            self.key = load_public_key(source if isinstance(source, bytes) else source.read_bytes())
        except (OSError, ValueError) as error:
            named = "this" if isinstance(source, bytes) else source
            raise SettingsError(
                f"{named} is not a public key ({error}); restore the folder as fedvlm wrote it"
            ) from error

    def __call__(self, message: Message, signer: str) -> None:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            signature = b64decode(str(message.header.get("signature", "")), validate=True)
            signed = self.prefix + checksum(message).encode()
            self.key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, ValueError) as error:
            raise FederationError(
                f"the message is not signed by {signer} of this federation; do both folders come from the same `fedvlm "
                "deploy init`?"
            ) from error
