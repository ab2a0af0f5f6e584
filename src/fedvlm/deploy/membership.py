"""What a server says of a site: this name, this key, until then; signed, and without a secret.

The file is certificate and kit in one: the server keeps it in `sites/`, and the site gets a copy
with all that it needs beside its own key. Taking it out of `sites/` ends the membership.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from fedvlm.deploy.keys import DAYS, Signer, Verifier, public_key
from fedvlm.engines.flower.wire import Parcel
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError
from fedvlm.storage.files import read_regular, write

NAME = "certificate.json"  # in a site's folder
SITES = "sites"  # in the server's folder: NAME.json of every site that is let in
ENDED = "ended"  # there, too: those of keys that were revoked or replaced
PREFIX = b"fedvlm certificate\n"
WORDS = ("federation", "site", "key", "begin", "until", "address", "ca", "server")
MOST = 1 << 16  # bytes of a file that comes from elsewhere
SOON = 30  # days before the end from which on it is spoken of


@dataclass(frozen=True)
class Membership:
    """A certificate whose signature was checked; whether it holds now is another question."""

    federation: str
    site: str
    key: str  # the site's public key
    begin: str
    until: str
    address: str  # of the server, host:port
    ca: str  # the root of the server's TLS
    server: str  # the server's public key, which signed this

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.federation, self.site, self.key)

    @property
    def days(self) -> int:
        """Whole days that are left; negative when it has ended."""
        return (datetime.fromisoformat(self.until) - datetime.now(UTC)).days

    @property
    def ended(self) -> str:
        """Why it does not hold now, or nothing."""
        now = datetime.now(UTC)
        if now >= datetime.fromisoformat(self.until):
            return f"its certificate has expired on {self.until[:10]}"
        if now < datetime.fromisoformat(self.begin):
            return f"its certificate is not yet valid, before {self.begin}; look at the clocks"
        return ""


def federation_of(server: bytes, ca: bytes) -> str:
    """Which federation it is: the keys that its messages and its TLS are trusted by."""
    return sha256(
        b"fedvlm federation\n" + json.dumps([server.decode(), ca.decode()]).encode()
    ).hexdigest()


def fingerprint(federation: str, site: str, key: str) -> str:
    """To be read out: 96 bits of whom a site takes for its server, its name and its key."""
    whole = sha256(b"fedvlm fingerprint\n" + json.dumps([federation, site, key]).encode())
    word = whole.hexdigest()[:24]
    return " ".join(word[i : i + 4] for i in range(0, 24, 4))


def lasting(days: int, folder: Path) -> str:
    """In words, for a person who has to act in time."""
    act = f" (renew it soon: fedvlm deploy renew {folder})" if days < SOON else ""
    return f"lasts {days} more days{act}"


def read_words(path: Path, kind: str, names: tuple[str, ...]) -> dict[str, str]:
    """A file from elsewhere: an object of this kind with these words, and nothing else."""
    try:
        words = json.loads(read_regular(path, MOST))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); name the {kind}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged, or no {kind}; have it sent again") from error
    wanted = {"kind", *names}
    if (
        not isinstance(words, dict)
        or words.keys() != wanted
        or words["kind"] != kind
        or not all(isinstance(one, str) for one in words.values())
    ):
        raise DataError(f"{path} is no {kind} of this version of fedvlm; have it made again")
    return words


def write_words(path: Path, kind: str, words: Mapping[str, str]) -> None:
    text = json.dumps({**words, "kind": kind}, indent=1, ensure_ascii=False)
    write(path, text.encode() + b"\n", 0o600)


def issue(server: Path, address: str, site: str, key: bytes, days: int = DAYS) -> Membership:
    """Signs a site's name and key, and lets it in from here on."""
    sign, now = Signer(server / "signing.key", PREFIX), datetime.now(UTC)
    ca = (server / "ca.crt").read_bytes()
    words = {
        "federation": federation_of(sign.public, ca),
        **{"site": site, "key": key.decode(), "address": address},
        "begin": (now - timedelta(hours=1)).isoformat(timespec="seconds"),
        "until": (now + timedelta(days=days)).isoformat(timespec="seconds"),
        **{"ca": ca.decode(), "server": sign.public.decode()},
    }
    keep(place(server, site), sign(Parcel({**words, "kind": "certificate"})).about)
    return Membership(**words)


def keep(path: Path, words: Mapping[str, str]) -> None:
    write_words(path, "certificate", words)


def place(server: Path, site: str) -> Path:
    return server / SITES / f"{site}.json"


def read_member(path: Path, server: bytes) -> Membership:
    """A certificate that this server signed."""
    words = read_words(path, "certificate", (*WORDS, "checksum", "signature"))
    try:
        Verifier(server, PREFIX)(Parcel(words), "the server")
        public_key(words["key"].encode())
        if federation_of(server, words["ca"].encode()) != words["federation"]:
            raise ValueError("of another federation")
        for name in ("begin", "until"):
            if datetime.fromisoformat(words[name]).tzinfo is None:
                raise ValueError("a time without its zone")
    except (FederationError, SettingsError, ValueError) as error:
        raise DataError(
            f"{path} is not signed by this federation's server, or was changed; have the server "
            "send it again, as `fedvlm deploy admit` wrote it"
        ) from error
    return Membership(**{name: words[name] for name in WORDS})


def member(server: Path, site: str) -> Membership:
    """The certificate that a site has at its server now."""
    path = place(server, site)
    if not path.exists():
        raise SettingsError(f"{site} has no certificate at this server, or its key was revoked")
    one = read_member(path, Signer(server / "signing.key").public)
    if one.site != site:
        raise DataError(f"{path} is the certificate of {one.site}; give the file its name back")
    return one


def known_member(server: Path, site: str) -> Membership | None:
    """The same; nothing if it is damaged."""
    try:
        return member(server, site)
    except FedVLMError:
        return None


def why_out(server: Path, site: str) -> str:
    """Why a site that was one of the federation is not now, or nothing."""
    one = known_member(server, site)
    return "its key was revoked" if one is None else one.ended


def sites(server: Path) -> list[str]:
    """Their names, whatever their certificates are worth."""
    return sorted(one.stem for one in (server / SITES).glob("*.json") if one.name[0] != ".")


def own(folder: Path) -> Membership:
    """The certificate in a site's folder, if it holds and is of the site's own key."""
    if not all((folder / name).exists() for name in (NAME, "server.pub", "key")):
        raise SettingsError(
            f"{folder} has no key with a certificate: no server has admitted this site, or an "
            f"older fedvlm made the kit; ask for it: fedvlm deploy join-request {folder}, and put "
            f"in what the server sends: fedvlm deploy accept {folder} FILE"
        )
    one = read_member(folder / NAME, (folder / "server.pub").read_bytes())
    if one.key.encode() != Signer(folder / "key").public:
        raise SettingsError(
            f"{folder / NAME} is of another key than {folder / 'key'}; take the newest that the "
            f"server sent: fedvlm deploy accept {folder} FILE"
        )
    if one.ended:
        raise FederationError(
            f"site {one.site}: {one.ended}; make a request for a new one: fedvlm deploy renew "
            f"{folder}"
        )
    return one
