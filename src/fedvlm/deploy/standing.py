"""How long the certificates of a server and its sites last, and the server's new one."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedvlm.deploy.admission import REQUEST, read_asked
from fedvlm.deploy.keys import Signer, paper_until, server_papers
from fedvlm.deploy.kits import ServerKit, read_server
from fedvlm.deploy.membership import ENDED, NAME, SOON, known_member, lasting, read_member
from fedvlm.errors import SettingsError
from fedvlm.storage.files import write


def renew_server(kit: ServerKit) -> int:
    """A new certificate of TLS by the same root, from the server's next start on; its days."""
    path = kit.folder / "ca.key"
    if not path.exists():
        raise SettingsError(
            f"there is no {path}, which an older fedvlm did not keep; make new kits"
        )
    papers = server_papers(kit.address.rpartition(":")[0], path.read_bytes())
    for name, data in papers.items():
        write(kit.folder / name, data, 0o600)
    return server_days(kit.folder)


def server_days(folder: Path) -> int:
    """Whole days until the server's TLS ends, by its own certificate or its root."""
    until = min(paper_until(folder / name) for name in ("server.pem", "ca.crt"))
    return (until - datetime.now(UTC)).days


def server_days_in_words(kit: ServerKit) -> list[str]:
    """How long the server's certificate lasts, and whose of the sites end soon."""
    lines = [f"its certificate {lasting(server_days(kit.folder), kit.folder)}"]
    for name in kit.sites:
        known = known_member(kit.folder, name)
        if known is None or known.days < SOON:
            left = "is damaged" if known is None else known.ended or f"has {known.days} days left"
            lines.append(f"{name}: its certificate {left.removeprefix('its certificate ')}")
    return lines


@dataclass(frozen=True)
class Standing:
    """A line about a key: whose, what people compare, and how long it holds."""

    name: str
    fingerprint: str
    days: int | None
    note: str = ""


def standings(folder: Path) -> list[Standing]:
    """The keys of a server's folder, or of a site's."""
    if not (folder / "server.toml").exists():
        return _site_standings(folder)
    kit = read_server(folder)
    lines = [Standing(f"server {kit.address} (TLS)", "", server_days(folder))]
    for name in kit.sites:
        known = known_member(kit.folder, name)
        note = (known.ended if known else "its certificate is damaged; revoke it") or ""
        word, days = (known.fingerprint, known.days) if known else ("", None)
        lines.append(Standing(name, word, days, note))
    for path in sorted((folder / ENDED).glob("*.json")):
        gone = read_member(path, Signer(folder / "signing.key").public)
        lines.append(Standing(gone.site, gone.fingerprint, None, "revoked or replaced"))
    return lines


def _site_standings(folder: Path) -> list[Standing]:
    lines = []
    if (folder / REQUEST).exists():
        asked = read_asked(folder / REQUEST)
        note = f"asked for; send {asked.path} to the server"
        lines.append(Standing(asked.site, asked.fingerprint, None, note))
    if (folder / NAME).exists():
        known = read_member(folder / NAME, (folder / "server.pub").read_bytes())
        lines.append(Standing(known.site, known.fingerprint, known.days, known.ended))
    if not lines:
        raise SettingsError(
            f"{folder} is no server's folder and no site's; name one, as DIR/server or DIR/site-a"
        )
    return lines
