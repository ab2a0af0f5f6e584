"""Enrol, renew and revoke sites; a site's private key never leaves its folder.

A site creates a key and a request from the server's invitation. The server signs the request once its people have
compared the fingerprint with the site's. The signed certificate goes back to the site.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from fedvlm.deploy.flower.network import split_address
from fedvlm.deploy.identity import certificates, keys
from fedvlm.deploy.kits import INVITATION_FILE, ServerKit, check_name, fill_site_folder, read_server, write_secret
from fedvlm.deploy.operations.security_log import log_security
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError, unknown_name
from fedvlm.storage.files import exclusive_lock, make_private_folder, write_file

JOIN_REQUEST_FILE = "request.json"  # in a site's folder, as long as it is not answered
NEXT_KEY_FILE = "key.next"  # there, too: the private key of the request
REQUEST_PREFIX, RENEWAL_PREFIX = b"fedvlm request\n", b"fedvlm renewal\n"
REQUEST_FIELDS = ("federation", "site", "key", "renewal")


@dataclass(frozen=True)
class JoinRequest:
    """Hold a request signed by its own key; people compare the fingerprint to know whose key it is."""

    path: Path
    federation: str
    site: str
    key: str
    renewal: str  # a signature by the key that the site has had, or nothing
    remark: str = ""  # what the server's people should know about it

    @property
    def fingerprint(self) -> str:
        return certificates.key_fingerprint(self.federation, self.site, self.key)


def create_join_request(folder: Path, invitation: Path | None = None, site: str | None = None) -> JoinRequest:
    """Create a key and the request to send, or return the pending one; a site with a certificate asks for a new key."""
    path = folder / JOIN_REQUEST_FILE
    if path.exists() and (folder / NEXT_KEY_FILE).exists():
        request = read_signed_request(path)
        if invitation is not None or site not in (None, request.site):
            raise SettingsError(
                f"{path} asks for {request.site} already; send it, or delete it and {folder / NEXT_KEY_FILE} to begin "
                "anew"
            )
        return request
    (folder / NEXT_KEY_FILE).unlink(missing_ok=True)  # of a request that was never written
    if (folder / certificates.CERTIFICATE_FILE).exists():
        federation, site, old = _renewal_target(folder, invitation, site)
    else:
        federation, site, old = *_join_target(folder, invitation, site), None
    make_private_folder(folder)
    hidden, public = keys.create_key_pair()
    words = {"federation": federation, "site": site, "key": public.decode()}
    endorsed = old(Message(words)).header["signature"] if old else ""
    write_secret(folder / NEXT_KEY_FILE, hidden)
    sign = keys.Signer(folder / NEXT_KEY_FILE, REQUEST_PREFIX)
    certificates.write_document(
        path, "request", sign(Message({**words, "renewal": endorsed, "kind": "request"})).header
    )
    return JoinRequest(path, federation, site, public.decode(), endorsed)


def _join_target(folder: Path, invitation: Path | None, site: str | None) -> tuple[str, str]:
    if invitation is None or site is None:
        raise SettingsError(
            f"{folder} has no certificate yet; name the site and the server's invitation, as fedvlm deploy "
            f"join-request {folder} --name NAME --invitation {INVITATION_FILE}"
        )
    check_name(site)
    words = certificates.read_document(invitation, "invitation", ("address", "ca", "server"))
    return certificates.federation_id(words["server"].encode(), words["ca"].encode()), site


def _renewal_target(folder: Path, invitation: Path | None, site: str | None) -> tuple[str, str, keys.Signer | None]:
    certificate = certificates.read_certificate(
        folder / certificates.CERTIFICATE_FILE, (folder / "server.pub").read_bytes()
    )
    if invitation is not None or site not in (None, certificate.site):
        raise SettingsError(
            f"{folder} is the folder of {certificate.site} and its server; for another name or federation take another "
            f"folder, for a new key say fedvlm deploy renew {folder}"
        )
    # An old key that has expired endorses nothing: the server's people compare the fingerprint again.
    old = None if certificate.invalid_reason else keys.Signer(folder / "key", RENEWAL_PREFIX)
    return certificate.federation, certificate.site, old


def read_signed_request(path: Path) -> JoinRequest:
    """Read a request and check that its own key signed it."""
    words = certificates.read_document(path, "request", (*REQUEST_FIELDS, "checksum", "signature"))
    try:
        keys.load_public_key(words["key"].encode())
        keys.Verifier(words["key"].encode(), REQUEST_PREFIX)(Message(words), "its maker")
    except (FederationError, ValueError) as error:
        raise DataError(
            f"{path} is not signed by the key that it names, so it was changed or damaged on its way; have the site "
            "send it again"
        ) from error
    return JoinRequest(path, **{name: words[name] for name in REQUEST_FIELDS})


def read_request(kit: ServerKit, path: Path) -> JoinRequest:
    """Read a request that this server may admit; a refusal is logged."""
    try:
        return _read_request(kit, path)
    except FedVLMError as error:
        log_security(kit.folder, "admission", "refused", target=path.name, reason=str(error))
        raise


def _read_request(kit: ServerKit, path: Path) -> JoinRequest:
    request, server = read_signed_request(path), kit.folder
    sign = keys.Signer(server / "signing.key")
    if request.federation != certificates.federation_id(sign.public, (server / "ca.crt").read_bytes()):
        raise FederationError(
            f"{path} is for another federation; have {request.site!r} make its request with {server / INVITATION_FILE}"
        )
    check_name(request.site)
    if (server / certificates.ENDED_FOLDER / _archive_name(request.key)).exists():
        raise FederationError(
            f"the key of {path} was revoked or replaced, and is never admitted again; have {request.site} delete its "
            "request and make a new one"
        )
    return replace(request, remark=_describe_request(kit, request))


def _describe_request(kit: ServerKit, request: JoinRequest) -> str:
    """Describe what admitting a request means, or refuse it if its name belongs to another key."""
    for name in certificates.admitted_sites(kit.folder):
        certificate = certificates.find_certificate(kit.folder, name)
        if certificate and certificate.key == request.key:
            raise FederationError(
                f"this key is already admitted as {name}; send the site its certificate: "
                f"{certificates.certificate_path(kit.folder, name)}"
            )
        if name.casefold() != request.site.casefold():
            continue
        is_valid = certificate and name == request.site and not certificate.invalid_reason
        if certificate and is_valid and _is_endorsed(request, certificate):
            return f"{name} renews its key; the old one is revoked"
        raise FederationError(
            f"the name {name} is taken by another key, which did not sign this request; if {name} itself has lost its "
            f"key or let it expire, end that: fedvlm deploy revoke {kit.folder} {name!r}, and admit this after "
            "comparing the fingerprint; else have the site choose another name"
        )
    if request.renewal:
        return f"{request.site} had a key that was revoked here; it is admitted as if it were new"
    return f"{request.site} is new here"


def _is_endorsed(request: JoinRequest, certificate: certificates.SiteCertificate) -> bool:
    words = {"federation": request.federation, "site": request.site, "key": request.key}
    try:
        check = keys.Verifier(certificate.key.encode(), RENEWAL_PREFIX)
        check(Message({**words, "signature": request.renewal}), certificate.site)
    except FederationError:
        return False
    return True


def admit_site(kit: ServerKit, request: JoinRequest) -> Path:
    """Sign a request, so that its key and no other of that name is admitted; return the file for the site."""
    with _admission_lock(kit):
        # The folder, or the request, may have changed since somebody compared the fingerprint.
        if read_request(kit, request.path) != request:
            raise FederationError(f"{request.path} was changed meanwhile; start again")
        _archive_certificate(kit, request.site)
        certificates.issue_certificate(kit.folder, kit.address, request.site, request.key.encode())
    log_security(kit.folder, "admission", "allowed", target=request.site, reason=request.remark)
    return certificates.certificate_path(kit.folder, request.site)


def revoke_site(kit: ServerKit, site: str) -> None:
    """Revoke a site's key, from its next message on."""
    with _admission_lock(kit):
        if site not in certificates.admitted_sites(kit.folder):
            raise unknown_name("site with a certificate", site, certificates.admitted_sites(kit.folder))
        _archive_certificate(kit, site)
        certificates.certificate_path(kit.folder, site).unlink()
    log_security(kit.folder, "revocation", "allowed", target=site)


def _admission_lock(kit: ServerKit) -> AbstractContextManager[None]:
    return exclusive_lock(kit.folder / ".admission", "somebody else is admitting or revoking; try again")


def _archive_certificate(kit: ServerKit, site: str) -> None:
    """Archive a site's certificate, so that its key is never admitted again."""
    if certificate := certificates.find_certificate(kit.folder, site):
        data = certificates.certificate_path(kit.folder, site).read_bytes()
        write_file(kit.folder / certificates.ENDED_FOLDER / _archive_name(certificate.key), data, 0o600)


def _archive_name(key: str) -> str:
    return sha256(key.encode()).hexdigest() + ".json"


def accept_certificate(folder: Path, file: Path) -> certificates.SiteCertificate:
    """Put the certificate that the server signed into the site's folder, beside its key."""
    server = certificates.read_document(
        file, "certificate", (*certificates.CERTIFICATE_FIELDS, "checksum", "signature")
    )["server"]
    certificate = certificates.read_certificate(file, server.encode())
    if certificate.federation != _requested_federation(folder):
        raise FederationError(
            f"{file} belongs to another federation than the one that {folder} asked to join; have its server send the "
            "certificate"
        )
    for name in (NEXT_KEY_FILE, "key"):
        if (folder / name).exists() and keys.Signer(folder / name).public == certificate.key.encode():
            break
    else:
        raise FederationError(
            f"{file} is for site {certificate.site} with a key that is not in {folder}; have the server send the "
            f"certificate of the newest request, {folder / JOIN_REQUEST_FILE}"
        )
    if certificate.invalid_reason:
        raise FederationError(f"{file}: {certificate.invalid_reason}; have the server admit a new request")
    fill_site_folder(folder, certificate, file.read_bytes())
    if name == NEXT_KEY_FILE:  # last, so that after a crash the same command goes on
        (folder / NEXT_KEY_FILE).replace(folder / "key")
    (folder / JOIN_REQUEST_FILE).unlink(missing_ok=True)
    return certificate


def _requested_federation(folder: Path) -> str:
    """Return the federation that this site asked to join."""
    if (folder / JOIN_REQUEST_FILE).exists():
        return read_signed_request(folder / JOIN_REQUEST_FILE).federation
    if (folder / certificates.CERTIFICATE_FILE).exists():
        return certificates.read_certificate(
            folder / certificates.CERTIFICATE_FILE, (folder / "server.pub").read_bytes()
        ).federation
    raise SettingsError(f"{folder} has not asked to join; make a request: fedvlm deploy join-request {folder}")


def renew_server_certificate(kit: ServerKit) -> int:
    """Create a new TLS certificate by the same root, used from the server's next start on; return its days."""
    path = kit.folder / "ca.key"
    if not path.exists():
        raise SettingsError(f"there is no {path}, which an older fedvlm did not keep; make new kits")
    papers = keys.create_server_certificate(split_address(kit.address)[0], path.read_bytes())
    for name, data in papers.items():
        write_file(kit.folder / name, data, 0o600)
    return server_days_left(kit.folder)


def server_days_left(folder: Path) -> int:
    """Return the whole days until the server's TLS certificate or its root expires."""
    until = min(keys.certificate_expiry(folder / name) for name in ("server.pem", "ca.crt"))
    return (until - datetime.now(UTC)).days


def describe_server_expiry(kit: ServerKit) -> list[str]:
    """Describe how long the server's certificate lasts, and which sites' certificates expire soon."""
    lines = [f"its certificate {certificates.describe_validity(server_days_left(kit.folder), kit.folder)}"]
    for name in kit.sites:
        certificate = certificates.find_certificate(kit.folder, name)
        if certificate is None:
            lines.append(f"{name}: its certificate is damaged")
        elif certificate.days_left < certificates.EXPIRY_WARNING_DAYS:
            lines.append(
                f"{name}: {certificate.invalid_reason or f'its certificate has {certificate.days_left} days left'}"
            )
    return lines


@dataclass(frozen=True)
class CertificateStatus:
    """Hold one key: its owner, the fingerprint that people compare, and how long it is valid."""

    name: str
    fingerprint: str
    days: int | None
    remark: str = ""


def certificate_statuses(folder: Path) -> list[CertificateStatus]:
    """List the keys of a server's or a site's folder."""
    if not (folder / "server.toml").exists():
        return _site_certificate_statuses(folder)
    kit = read_server(folder)
    lines = [CertificateStatus(f"server {kit.address} (TLS)", "", server_days_left(folder))]
    for name in kit.sites:
        certificate = certificates.find_certificate(kit.folder, name)
        remark = (certificate.invalid_reason if certificate else "its certificate is damaged; revoke it") or ""
        word, days = (certificate.fingerprint, certificate.days_left) if certificate else ("", None)
        lines.append(CertificateStatus(name, word, days, remark))
    for path in sorted((folder / certificates.ENDED_FOLDER).glob("*.json")):
        revoked = certificates.read_certificate(path, keys.Signer(folder / "signing.key").public)
        lines.append(CertificateStatus(revoked.site, revoked.fingerprint, None, "revoked or replaced"))
    return lines


def _site_certificate_statuses(folder: Path) -> list[CertificateStatus]:
    lines = []
    if (folder / JOIN_REQUEST_FILE).exists():
        request = read_signed_request(folder / JOIN_REQUEST_FILE)
        remark = f"requested; send {request.path} to the server"
        lines.append(CertificateStatus(request.site, request.fingerprint, None, remark))
    if (folder / certificates.CERTIFICATE_FILE).exists():
        own = certificates.read_certificate(
            folder / certificates.CERTIFICATE_FILE, (folder / "server.pub").read_bytes()
        )
        lines.append(CertificateStatus(own.site, own.fingerprint, own.days_left, own.invalid_reason))
    if not lines:
        raise SettingsError(f"{folder} is neither a server's folder nor a site's; name e.g. DIR/server or DIR/site-a")
    return lines
