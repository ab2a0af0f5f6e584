"""Create and use the keys, TLS certificates and signatures of a federation.

TLS proves that a site talks to its server; signatures prove that the holder of the server's or a site's folder made a
message, whoever may reach the port.
"""

import ipaddress
import os
import sys
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from getpass import getpass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedvlm.engines.flower.messages import Message, checksum
from fedvlm.errors import FederationError, SettingsError

CERTIFICATE_DAYS = 365  # a certificate lasts
ROOT_CERTIFICATE_DAYS = 3650  # and the root that the server's are made by: sites need no new one meanwhile
ROOT_NAME = "fedvlm federation"
MESSAGE_PREFIX = b"fedvlm parcel\n"  # so that no other signature of the same key fits
SIGNATURE_SCHEME = ec.ECDSA(hashes.SHA256())
PEM = serialization.Encoding.PEM
PASSPHRASE_VARIABLE = "FEDVLM_KEY_PASSPHRASE_FILE"  # names a file with the passphrase of all key files


def create_certificates(host: str, start: datetime | None = None, days: int = CERTIFICATE_DAYS) -> dict[str, bytes]:
    """Create a root certificate with its key, and the server's certificate signed by it."""
    root = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(root.public_key())
    ca = _certificate_builder(ROOT_NAME, root.public_key(), start, ROOT_CERTIFICATE_DAYS, authority=True)
    ca = ca.add_extension(usage, critical=True).add_extension(identifier, critical=False)
    papers = {"ca.crt": ca.sign(root, hashes.SHA256()).public_bytes(PEM), "ca.key": _private_pem(root)}
    return papers | create_server_certificate(host, papers["ca.key"], start, days)


def create_server_certificate(
    host: str, ca_key: bytes, start: datetime | None = None, days: int = CERTIFICATE_DAYS
) -> dict[str, bytes]:
    """Create a key and a certificate for the server, signed by the root that its sites know."""
    root = load_private_key(ca_key, "ca.key")
    server_key = ec.generate_private_key(ec.SECP256R1())
    loopback_names = {"localhost", "127.0.0.1", "::1"}  # the server's own processes reach it there
    names = x509.SubjectAlternativeName([_alternative_name(name) for name in sorted({host, *loopback_names})])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key())
    paper = _certificate_builder(host, server_key.public_key(), start, days, authority=False)
    paper = paper.add_extension(names, critical=False).add_extension(issuer, critical=False)
    return {"server.pem": paper.sign(root, hashes.SHA256()).public_bytes(PEM), "server.key": _private_pem(server_key)}


def _certificate_builder(word: str, key: Any, start: datetime | None, days: int, authority: bool) -> Any:
    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    start = start or datetime.now(UTC) - timedelta(hours=1)  # for slow clocks
    builder = x509.CertificateBuilder().subject_name(named(word)).issuer_name(named(ROOT_NAME))
    builder = builder.public_key(key).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(start).not_valid_after(start + timedelta(days=days))
    length = 0 if authority else None
    return builder.add_extension(x509.BasicConstraints(authority, length), critical=True)


def _private_pem(key: Any) -> bytes:
    encryption: Any = serialization.NoEncryption()
    if PASSPHRASE_VARIABLE in os.environ:
        encryption = serialization.BestAvailableEncryption(read_passphrase("the new key"))
    return bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, encryption))


def read_passphrase(name: object) -> bytes:
    """Return the passphrase of key files from the file that the environment names, or ask for it."""
    if path := os.environ.get(PASSPHRASE_VARIABLE):
        try:
            return Path(path).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise SettingsError(f"{PASSPHRASE_VARIABLE} = {path} cannot be read ({error.strerror})") from error
    if not sys.stdin.isatty():
        raise SettingsError(f"{name} has a passphrase; write it to a file that {PASSPHRASE_VARIABLE} names")
    passphrase = getpass(f"Passphrase of {name}: ").encode()
    if sys.platform == "linux":  # processes that this one starts read it from its memory
        descriptor = os.memfd_create("passphrase")
        os.write(descriptor, passphrase)
        os.environ[PASSPHRASE_VARIABLE] = f"/proc/{os.getpid()}/fd/{descriptor}"
    return passphrase


def load_private_key(data: bytes, name: object) -> Any:
    """Load a private key, in OpenSSH's format or PKCS8; ask for its passphrase if it has one."""
    is_openssh = b"OPENSSH PRIVATE KEY" in data
    load: Any = serialization.load_ssh_private_key if is_openssh else serialization.load_pem_private_key
    try:
        try:
            return load(data, None)
        except TypeError:  # it has a passphrase
            return load(data, read_passphrase(name))
    except UnsupportedAlgorithm as error:
        raise SettingsError(
            f"{name} is encrypted as fedvlm cannot read it; ssh-keygen -p -m PKCS8 -f {name}"
        ) from error
    except ValueError as error:
        raise SettingsError(
            f"{name} is not a private key, or its passphrase is wrong ({error}); restore the folder as fedvlm "
            f"wrote it, or correct the file that {PASSPHRASE_VARIABLE} names"
        ) from error


def certificate_expiry(path: Path) -> datetime:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} is not a certificate ({error}); restore the folder") from error


def _alternative_name(host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def create_key_pair() -> tuple[bytes, bytes]:
    """Create an elliptic-curve key pair as Flower's node authentication needs it: private and public part."""
    key = ec.generate_private_key(ec.SECP384R1())
    if PASSPHRASE_VARIABLE in os.environ:
        return _private_pem(key), _openssh(key.public_key())
    private = key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    return private, _openssh(key.public_key())


def _openssh(key: Any) -> bytes:
    form = serialization.PublicFormat.OpenSSH
    return bytes(key.public_bytes(serialization.Encoding.OpenSSH, form))


def load_public_key(data: bytes) -> Any:
    """Load a public key of the kind that `create_key_pair` makes; raise ValueError for any other."""
    try:
        key = serialization.load_ssh_public_key(data)
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
        self.prefix = prefix
        try:
            self.key = load_private_key(path.read_bytes(), path)
        except OSError as error:
            raise SettingsError(f"{path} is not a private key ({error}); restore the folder") from error

    @property
    def public(self) -> bytes:
        return _openssh(self.key.public_key())

    def __call__(self, message: Message) -> Message:
        """Return the message with a checksum and a signature over it."""
        digest = checksum(message)
        signature = self.key.sign(self.prefix + digest.encode(), SIGNATURE_SCHEME)
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
            raise SettingsError(f"{named} is not a public key ({error}); restore the folder") from error

    def __call__(self, message: Message, signer: str) -> None:
        try:
            signature = b64decode(str(message.header.get("signature", "")), validate=True)
            signed = self.prefix + checksum(message).encode()
            self.key.verify(signature, signed, SIGNATURE_SCHEME)
        except (InvalidSignature, ValueError) as error:
            raise FederationError(
                f"the message is not signed by {signer} of this federation; do both folders come from the same `fedvlm "
                "deploy init`?"
            ) from error


def sign_bytes(signer: Signer, data: bytes) -> bytes:
    """Sign bytes that name their purpose at their beginning."""
    return bytes(signer.key.sign(data, SIGNATURE_SCHEME))


def verify_bytes(public_key: bytes, data: bytes, signature: bytes) -> bool:
    try:
        load_public_key(public_key).verify(signature, data, SIGNATURE_SCHEME)
    except (InvalidSignature, ValueError):
        return False
    return True
