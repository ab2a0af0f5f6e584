"""Issue and read site certificates: name, key and validity, signed by the server, without a secret.

The file is certificate and kit in one: the server keeps it in `sites/`, and the site gets a copy with all that it needs
beside its own key. Removing it from `sites/` revokes the site.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from fedvlm.deploy.identity.keys import CERTIFICATE_DAYS, Signer, Verifier, load_public_key
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError
from fedvlm.storage.files import read_regular, write_file

CERTIFICATE_FILE = "certificate.json"  # in a site's folder
SITES_FOLDER = "sites"  # in the server's folder: NAME.json of every site that is let in
ENDED_FOLDER = "ended"  # there, too: those of keys that were revoked or replaced
CERTIFICATE_PREFIX = b"fedvlm certificate\n"
CERTIFICATE_FIELDS = ("federation", "site", "key", "valid_from", "valid_until", "address", "ca", "server")
MAX_DOCUMENT_BYTES = 1 << 16  # bytes of a file that comes from elsewhere
CONTACTS_FOLDER = "contacts"  # in the server's folder: a file per site, as old as its last call
CONTACT_SECONDS = 5.0  # between two notes of one site's calls
EXPIRY_WARNING_DAYS = 30  # days before the end from which on it is spoken of


@dataclass(frozen=True)
class SiteCertificate:
    """Hold a certificate whose signature was checked; it may have expired."""

    federation: str
    site: str
    key: str  # the site's public key
    valid_from: str
    valid_until: str
    address: str  # of the server, host:port
    ca: str  # the root of the server's TLS
    server: str  # the server's public key, which signed this

    @property
    def fingerprint(self) -> str:
        return key_fingerprint(self.federation, self.site, self.key)

    @property
    def days_left(self) -> int:
        """Return the whole days left; negative when it has expired."""
        return (datetime.fromisoformat(self.valid_until) - datetime.now(UTC)).days

    @property
    def invalid_reason(self) -> str:
        """Return why it is not valid now, or nothing."""
        now = datetime.now(UTC)
        if now >= datetime.fromisoformat(self.valid_until):
            return f"its certificate has expired on {self.valid_until[:10]}"
        if now < datetime.fromisoformat(self.valid_from):
            return f"its certificate is not yet valid, before {self.valid_from}; check the clocks"
        return ""


def record_contact(folder: Path, site: str) -> None:
    """Note that a site has called the server now."""
    path, before = folder / CONTACTS_FOLDER / f".{site}", last_contact(folder, site)  # a dot: not in backups
    if before is not None and abs((datetime.now(UTC) - before).total_seconds()) < CONTACT_SECONDS:
        return
    with suppress(OSError):  # a full disk keeps no site out
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch(0o600)


def last_contact(folder: Path, site: str) -> datetime | None:
    try:
        return datetime.fromtimestamp((folder / CONTACTS_FOLDER / f".{site}").stat().st_mtime, UTC)
    except OSError:
        return None


def federation_id(server: bytes, ca: bytes) -> str:
    """Identify a federation by the keys of its messages and of its TLS."""
    return sha256(b"fedvlm federation\n" + json.dumps([server.decode(), ca.decode()]).encode()).hexdigest()


def key_fingerprint(federation: str, site: str, key: str) -> str:
    """Return 96 bits of federation, site name and key, to be compared by phone."""
    digest = sha256(b"fedvlm fingerprint\n" + json.dumps([federation, site, key]).encode())
    word = digest.hexdigest()[:24]
    return " ".join(word[i : i + 4] for i in range(0, 24, 4))


def describe_validity(days: int, folder: Path) -> str:
    """Describe how long a certificate lasts, with the command to renew it in time."""
    act = f" (renew it soon: fedvlm deploy renew {folder})" if days < EXPIRY_WARNING_DAYS else ""
    return f"lasts {days} more days{act}"


def read_document(path: Path, kind: str, names: tuple[str, ...]) -> dict[str, str]:
    """Read a file from elsewhere: a JSON object of this kind with exactly these fields."""
    try:
        words = json.loads(read_regular(path, MAX_DOCUMENT_BYTES))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); name the {kind}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged, or not a {kind}; ask for it again") from error
    is_valid = isinstance(words, dict) and words.keys() == {"kind", *names} and words["kind"] == kind
    if not is_valid or not all(isinstance(value, str) for value in words.values()):
        raise DataError(f"{path} is not a valid {kind} of this version of fedvlm; ask for a new one")
    return dict(words)


def write_document(path: Path, kind: str, words: Mapping[str, str]) -> None:
    text = json.dumps({**words, "kind": kind}, indent=1, ensure_ascii=False)
    write_file(path, text.encode() + b"\n", 0o600)


def issue_certificate(
    server: Path, address: str, site: str, key: bytes, days: int = CERTIFICATE_DAYS
) -> SiteCertificate:
    """Sign a site's name and key, and admit it from now on."""
    sign, now = Signer(server / "signing.key", CERTIFICATE_PREFIX), datetime.now(UTC)
    ca = (server / "ca.crt").read_bytes()
    words = {
        "federation": federation_id(sign.public, ca),
        **{"site": site, "key": key.decode(), "address": address},
        "valid_from": (now - timedelta(hours=1)).isoformat(timespec="seconds"),
        "valid_until": (now + timedelta(days=days)).isoformat(timespec="seconds"),
        **{"ca": ca.decode(), "server": sign.public.decode()},
    }
    header = sign(Message({**words, "kind": "certificate"})).header
    write_document(certificate_path(server, site), "certificate", header)
    return SiteCertificate(**words)


def certificate_path(server: Path, site: str) -> Path:
    return server / SITES_FOLDER / f"{site}.json"


def read_certificate(path: Path, server: bytes) -> SiteCertificate:
    """Read a certificate that this server signed."""
    words = read_document(path, "certificate", (*CERTIFICATE_FIELDS, "checksum", "signature"))
    try:
        Verifier(server, CERTIFICATE_PREFIX)(Message(words), "the server")
        load_public_key(words["key"].encode())
        if federation_id(server, words["ca"].encode()) != words["federation"]:
            raise ValueError("of another federation")
        for name in ("valid_from", "valid_until"):
            if datetime.fromisoformat(words[name]).tzinfo is None:
                raise ValueError("a time without its zone")
    except (FederationError, SettingsError, ValueError) as error:
        raise DataError(
            f"{path} is not signed by this federation's server, or was changed; have the server send it again, as "
            "`fedvlm deploy admit` wrote it"
        ) from error
    return SiteCertificate(**{name: words[name] for name in CERTIFICATE_FIELDS})


def current_certificate(server: Path, site: str) -> SiteCertificate:
    path = certificate_path(server, site)
    if not path.exists():
        raise SettingsError(f"{site} has no certificate at this server, or its key was revoked")
    certificate = read_certificate(path, Signer(server / "signing.key").public)
    if certificate.site != site:
        raise DataError(f"{path} is the certificate of {certificate.site}; rename the file back")
    return certificate


def find_certificate(server: Path, site: str) -> SiteCertificate | None:
    """Return the current certificate, or None if it is missing or damaged."""
    try:
        return current_certificate(server, site)
    except FedVLMError:
        return None


def exclusion_reason(server: Path, site: str) -> str:
    """Return why a site no longer belongs to the federation, or nothing."""
    certificate = find_certificate(server, site)
    return "its key was revoked" if certificate is None else certificate.invalid_reason


def admitted_sites(server: Path) -> list[str]:
    """Return the names of all sites with a certificate, valid or not."""
    return sorted(path.stem for path in (server / SITES_FOLDER).glob("*.json") if path.name[0] != ".")


def read_own_certificate(folder: Path) -> SiteCertificate:
    """Return the certificate in a site's folder, if it is valid and matches the site's key."""
    if not all((folder / name).exists() for name in (CERTIFICATE_FILE, "server.pub", "key")):
        raise SettingsError(
            f"{folder} has no key with a certificate: no server has admitted this site, or an older fedvlm made the "
            f"kit; ask for it: fedvlm deploy join-request {folder}, and put in what the server sends: fedvlm deploy "
            f"accept {folder} FILE"
        )
    certificate = read_certificate(folder / CERTIFICATE_FILE, (folder / "server.pub").read_bytes())
    if certificate.key.encode() != Signer(folder / "key").public:
        raise SettingsError(
            f"{folder / CERTIFICATE_FILE} is for another key than {folder / 'key'}; use the newest that the server "
            f"sent: fedvlm deploy accept {folder} FILE"
        )
    if certificate.invalid_reason:
        raise FederationError(
            f"site {certificate.site}: {certificate.invalid_reason}; request a new one: fedvlm deploy renew {folder}"
        )
    return certificate
