"""How a site joins, gets a new key and leaves; its private key never leaves its folder.

A site makes a key and a request out of the server's invitation. The server signs the request once
its people have heard the fingerprint from the site's. What it signed goes back to the site.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from fedvlm.deploy.keys import Signer, Verifier, key_pair, public_key
from fedvlm.deploy.kits import INVITATION, ServerKit, check_name, fill, secret
from fedvlm.deploy.membership import (
    ENDED,
    NAME,
    Membership,
    federation_of,
    fingerprint,
    issue,
    known_member,
    place,
    read_member,
    read_words,
    sites,
    write_words,
)
from fedvlm.deploy.membership import WORDS as FIELDS
from fedvlm.engines.flower.wire import Parcel
from fedvlm.errors import DataError, FederationError, SettingsError, unknown
from fedvlm.storage.files import alone, private, write

REQUEST = "request.json"  # in a site's folder, as long as it is not answered
NEXT = "key.next"  # there, too: the private key of the request
PREFIX, RENEWAL = b"fedvlm request\n", b"fedvlm renewal\n"
WORDS = ("federation", "site", "key", "renewal")


@dataclass(frozen=True)
class Request:
    """A request whose holder has the private key of it; whose voice that is, people can tell."""

    path: Path
    federation: str
    site: str
    key: str
    renewal: str  # a signature by the key that the site has had, or nothing
    note: str = ""  # what the server's people should know about it

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.federation, self.site, self.key)


def join_request(folder: Path, invitation: Path | None = None, site: str | None = None) -> Request:
    """A new key in the site's folder, and the request to be sent; the same again if there is one.

    A site that has a certificate asks for one with another key, under its name.
    """
    path = folder / REQUEST
    if path.exists() and (folder / NEXT).exists():
        one = read_asked(path)
        if invitation is not None or site not in (None, one.site):
            raise SettingsError(
                f"{path} asks for {one.site} already; send it, or delete it and {folder / NEXT} to "
                "begin anew"
            )
        return one
    (folder / NEXT).unlink(missing_ok=True)  # of a request that was never written
    if (folder / NAME).exists():
        federation, site, old = _renewing(folder, invitation, site)
    else:
        federation, site, old = *_joining(folder, invitation, site), None
    private(folder)
    hidden, public = key_pair()
    words = {"federation": federation, "site": site, "key": public.decode()}
    endorsed = old(Parcel(words)).about["signature"] if old else ""
    secret(folder / NEXT, hidden)
    sign = Signer(folder / NEXT, PREFIX)
    write_words(
        path, "request", sign(Parcel({**words, "renewal": endorsed, "kind": "request"})).about
    )
    return Request(path, federation, site, public.decode(), endorsed)


def _joining(folder: Path, invitation: Path | None, site: str | None) -> tuple[str, str]:
    if invitation is None or site is None:
        raise SettingsError(
            f"{folder} has no certificate yet; name the site and the server's invitation, as "
            f"fedvlm deploy join-request {folder} --name NAME --invitation {INVITATION}"
        )
    check_name(site)
    words = read_words(invitation, "invitation", ("address", "ca", "server"))
    return federation_of(words["server"].encode(), words["ca"].encode()), site


def _renewing(
    folder: Path, invitation: Path | None, site: str | None
) -> tuple[str, str, Signer | None]:
    one = read_member(folder / NAME, (folder / "server.pub").read_bytes())
    if invitation is not None or site not in (None, one.site):
        raise SettingsError(
            f"{folder} is the folder of {one.site} and its server; for another name or federation "
            f"take another folder, for a new key say fedvlm deploy renew {folder}"
        )
    # An old key that has expired vouches for nobody: the server's people begin anew.
    return one.federation, one.site, None if one.ended else Signer(folder / "key", RENEWAL)


def read_asked(path: Path) -> Request:
    """A request as its maker signed it."""
    words = read_words(path, "request", (*WORDS, "checksum", "signature"))
    try:
        public_key(words["key"].encode())
        Verifier(words["key"].encode(), PREFIX)(Parcel(words), "its maker")
    except (FederationError, ValueError) as error:
        raise DataError(
            f"{path} is not signed by the key that it names, so it was changed or damaged on its "
            "way; have the site send it again"
        ) from error
    return Request(path, **{name: words[name] for name in WORDS})


def read_request(kit: ServerKit, path: Path) -> Request:
    """A request that this server may admit."""
    one, server = read_asked(path), kit.folder
    sign = Signer(server / "signing.key")
    if one.federation != federation_of(sign.public, (server / "ca.crt").read_bytes()):
        raise FederationError(
            f"{path} is for another federation; have {one.site!r} make its request with "
            f"{server / INVITATION}"
        )
    check_name(one.site)
    if (server / ENDED / _digest(one.key)).exists():
        raise FederationError(
            f"the key of {path} was revoked or replaced, and does not come back; have {one.site} "
            "delete its request and make a new one"
        )
    return replace(one, note=_note(kit, one))


def _note(kit: ServerKit, one: Request) -> str:
    """What becomes of the name; a refusal if it is another's."""
    for name in sites(kit.folder):
        known = known_member(kit.folder, name)
        if known and known.key == one.key:
            raise FederationError(
                f"this very key was admitted as {name}, and is so once; send the site its "
                f"certificate: {place(kit.folder, name)}"
            )
        if name.casefold() != one.site.casefold():
            continue
        if known and name == one.site and not known.ended and _endorsed(one, known):
            return f"{name} renews its key; the old one ends"
        raise FederationError(
            f"the name {name} is taken by another key, which did not sign this request; if {name} "
            "itself has lost its key or let it expire, end that: fedvlm deploy revoke "
            f"{kit.folder} {name!r}, and admit this after comparing the fingerprint; else have "
            "the site choose another name"
        )
    if one.renewal:
        return f"{one.site} had a key that was revoked here; it is admitted as if it were new"
    return f"{one.site} is new here"


def _endorsed(one: Request, known: Membership) -> bool:
    words = {"federation": one.federation, "site": one.site, "key": one.key}
    try:
        check = Verifier(known.key.encode(), RENEWAL)
        check(Parcel({**words, "signature": one.renewal}), known.site)
    except FederationError:
        return False
    return True


def admit(kit: ServerKit, request: Request) -> Path:
    """Signs it: from now on the key is let in, and no other of that name; the file for the site."""
    with _changing(kit):
        # The folder, or the request, may have changed since somebody compared the fingerprint.
        if read_request(kit, request.path) != request:
            raise FederationError(f"{request.path} was changed meanwhile; begin again")
        _note_end(kit, request.site)
        issue(kit.folder, kit.address, request.site, request.key.encode())
    return place(kit.folder, request.site)


def revoke(kit: ServerKit, site: str) -> None:
    """Ends a site's key, from its next message on."""
    with _changing(kit):
        if site not in sites(kit.folder):
            raise unknown("site with a certificate", site, sites(kit.folder))
        _note_end(kit, site)
        place(kit.folder, site).unlink()


def _changing(kit: ServerKit) -> AbstractContextManager[None]:
    return alone(kit.folder / ".admission", "somebody else is admitting or revoking; try again")


def _note_end(kit: ServerKit, site: str) -> None:
    """Keeps the certificate that a site has, so that its key never comes back."""
    if known := known_member(kit.folder, site):
        write(kit.folder / ENDED / _digest(known.key), place(kit.folder, site).read_bytes(), 0o600)


def _digest(key: str) -> str:
    return sha256(key.encode()).hexdigest() + ".json"


def accept(folder: Path, file: Path) -> Membership:
    """Puts what the server signed into the site's folder, beside the key that it is for."""
    server = read_words(file, "certificate", (*FIELDS, "checksum", "signature"))["server"]
    one = read_member(file, server.encode())
    if one.federation != _asked(folder):
        raise FederationError(
            f"{file} is of another federation than the one that {folder} asked to join; have its "
            "server send the certificate"
        )
    for name in (NEXT, "key"):
        if (folder / name).exists() and Signer(folder / name).public == one.key.encode():
            break
    else:
        raise FederationError(
            f"{file} is for site {one.site} with a key that is not in {folder}; have the server "
            f"send the certificate of the newest request, {folder / REQUEST}"
        )
    if one.ended:
        raise FederationError(f"{file}: {one.ended}; have the server admit a new request")
    fill(folder, one, file.read_bytes())
    if name == NEXT:  # last, so that after a crash the same command goes on
        (folder / NEXT).replace(folder / "key")
    (folder / REQUEST).unlink(missing_ok=True)
    return one


def _asked(folder: Path) -> str:
    """The federation that a site's people have chosen."""
    if (folder / REQUEST).exists():
        return read_asked(folder / REQUEST).federation
    if (folder / NAME).exists():
        return read_member(folder / NAME, (folder / "server.pub").read_bytes()).federation
    raise SettingsError(
        f"{folder} has not asked to join; make a request: fedvlm deploy join-request {folder}"
    )
