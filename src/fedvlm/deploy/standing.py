"""How long the certificates of a server and its sites last, and the server's new one."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedvlm.deploy.admission import JOIN_REQUEST_FILE, read_signed_request
from fedvlm.deploy.keys import Signer, certificate_expiry, create_server_certificate
from fedvlm.deploy.kits import ServerKit, read_server
from fedvlm.deploy.membership import (
    CERTIFICATE_FILE,
    ENDED_FOLDER,
    EXPIRY_WARNING_DAYS,
    describe_validity,
    find_certificate,
    read_certificate,
)
from fedvlm.errors import SettingsError
from fedvlm.storage.files import write_file


def renew_server_certificate(kit: ServerKit) -> int:
    """A new certificate of TLS by the same root, from the server's next start on; its days."""
    path = kit.folder / "ca.key"
    if not path.exists():
        raise SettingsError(f"there is no {path}, which an older fedvlm did not keep; make new kits")
    papers = create_server_certificate(kit.address.rpartition(":")[0], path.read_bytes())
    for name, data in papers.items():
        write_file(kit.folder / name, data, 0o600)
    return server_days_left(kit.folder)


def server_days_left(folder: Path) -> int:
    """Whole days until the server's TLS ends, by its own certificate or its root."""
    until = min(certificate_expiry(folder / name) for name in ("server.pem", "ca.crt"))
    return (until - datetime.now(UTC)).days


def describe_server_expiry(kit: ServerKit) -> list[str]:
    """How long the server's certificate lasts, and whose of the sites end soon."""
    lines = [f"its certificate {describe_validity(server_days_left(kit.folder), kit.folder)}"]
    for name in kit.sites:
        certificate = find_certificate(kit.folder, name)
        if certificate is None or certificate.days_left < EXPIRY_WARNING_DAYS:
            status = (
                "is damaged"
                if certificate is None
                else certificate.invalid_reason or f"has {certificate.days_left} days left"
            )
            lines.append(f"{name}: its certificate {status.removeprefix('its certificate ')}")
    return lines


@dataclass(frozen=True)
class CertificateStatus:
    """A line about a key: whose, what people compare, and how long it holds."""

    name: str
    fingerprint: str
    days: int | None
    remark: str = ""


def certificate_statuses(folder: Path) -> list[CertificateStatus]:
    """The keys of a server's folder, or of a site's."""
    if not (folder / "server.toml").exists():
        return _site_certificate_statuses(folder)
    kit = read_server(folder)
    lines = [CertificateStatus(f"server {kit.address} (TLS)", "", server_days_left(folder))]
    for name in kit.sites:
        certificate = find_certificate(kit.folder, name)
        remark = (certificate.invalid_reason if certificate else "its certificate is damaged; revoke it") or ""
        word, days = (certificate.fingerprint, certificate.days_left) if certificate else ("", None)
        lines.append(CertificateStatus(name, word, days, remark))
    for path in sorted((folder / ENDED_FOLDER).glob("*.json")):
        revoked = read_certificate(path, Signer(folder / "signing.key").public)
        lines.append(CertificateStatus(revoked.site, revoked.fingerprint, None, "revoked or replaced"))
    return lines


def _site_certificate_statuses(folder: Path) -> list[CertificateStatus]:
    lines = []
    if (folder / JOIN_REQUEST_FILE).exists():
        request = read_signed_request(folder / JOIN_REQUEST_FILE)
        remark = f"asked for; send {request.path} to the server"
        lines.append(CertificateStatus(request.site, request.fingerprint, None, remark))
    if (folder / CERTIFICATE_FILE).exists():
        certificate = read_certificate(folder / CERTIFICATE_FILE, (folder / "server.pub").read_bytes())
        lines.append(
            CertificateStatus(
                certificate.site, certificate.fingerprint, certificate.days_left, certificate.invalid_reason
            )
        )
    if not lines:
        raise SettingsError(f"{folder} is no server's folder and no site's; name one, as DIR/server or DIR/site-a")
    return lines
