"""Certificates, keys and signatures of a federation.

TLS says that a site talks to its server; signatures say that a parcel was made by the holder of
the server's or a site's folder, whoever may reach the port.
"""

import ipaddress
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedvlm.engines.flower.wire import Parcel, checksum
from fedvlm.errors import FederationError, SettingsError

DAYS = 365  # a certificate lasts
PREFIX = b"fedvlm parcel\n"  # so that no other signature of the same key fits


def _need() -> Any:
    try:
        import cryptography
    except ImportError as error:
        raise SettingsError(
            "certificates need the package cryptography; pip install 'fedvlm[flower]'"
        ) from error
    return cryptography


def certificates(host: str, begin: datetime | None = None, days: int = DAYS) -> dict[str, bytes]:
    """A root of its own, whose key is forgotten at once, and the server's certificate by it."""
    _need()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    begin = begin or datetime.now(UTC) - timedelta(hours=1)
    root, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def named(word: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, word)])

    def build(word: str, key: Any, authority: bool) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(named(word))
        builder = builder.issuer_name(named("fedvlm federation")).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(begin).not_valid_after(begin + timedelta(days=days))
        length = 0 if authority else None
        return builder.add_extension(x509.BasicConstraints(authority, length), critical=True)

    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(root.public_key())
    ca = build("fedvlm federation", root, True).add_extension(usage, critical=True)
    ca = ca.add_extension(identifier, critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key())
    near = {"localhost", "127.0.0.1"}  # Flower's own processes on the server reach it there
    names = x509.SubjectAlternativeName([_name(one) for one in sorted({host, *near})])
    server = build(host, own, False).add_extension(names, critical=False)
    server = server.add_extension(issuer, critical=False)
    pem = serialization.Encoding.PEM
    return {
        "ca.crt": ca.sign(root, hashes.SHA256()).public_bytes(pem),
        "server.pem": server.sign(root, hashes.SHA256()).public_bytes(pem),
        "server.key": own.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    }


def _name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def key_pair() -> tuple[bytes, bytes]:
    """An elliptic-curve key as Flower's node authentication takes it: private and public part."""
    _need()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private, public


class Signer:
    """Signs parcels with a private key file."""

    def __init__(self, path: Path) -> None:
        _need()
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        try:
            self.key: Any = load_ssh_private_key(path.read_bytes(), None)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"{path} is no private key ({error}); take the kit as `fedvlm deploy init` wrote it"
            ) from error

    def __call__(self, parcel: Parcel) -> Parcel:
        """The parcel sealed: with a checksum, and a signature over it."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        digest = checksum(parcel)
        signature = self.key.sign(PREFIX + digest.encode(), ec.ECDSA(hashes.SHA256()))
        words = {"checksum": digest, "signature": b64encode(signature).decode()}
        return Parcel({**parcel.about, **words}, parcel.arrays)


class Verifier:
    """Checks parcels against a public key file."""

    def __init__(self, path: Path) -> None:
        _need()
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key

        try:
            self.key: Any = load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"{path} is no public key ({error}); take the kit as `fedvlm deploy init` wrote it"
            ) from error

    def __call__(self, parcel: Parcel, who: str) -> None:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            signature = b64decode(str(parcel.about.get("signature", "")), validate=True)
            signed = PREFIX + checksum(parcel).encode()
            self.key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, ValueError) as error:
            raise FederationError(
                f"the message is not signed by {who} of this federation; "
                "are both kits of the same `fedvlm deploy init`?"
            ) from error
