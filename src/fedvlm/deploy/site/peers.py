"""Keep the list of other sites whose keys people at this site have compared; the server never writes it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedvlm.core.schema import read_table
from fedvlm.deploy.identity.certificates import key_fingerprint
from fedvlm.deploy.messages import RequestRefused
from fedvlm.deploy.plan import Plan
from fedvlm.errors import SettingsError, unknown_name
from fedvlm.runner.experiment_files import read_toml
from fedvlm.storage.files import to_toml, write_file

PEERS_FILE = "peers.toml"  # in a site's folder
FINGERPRINT = re.compile(r"[0-9a-f]{24}")


@dataclass(frozen=True)
class Peer:
    name: str
    fingerprint: str  # of federation, name and key
    compared_by: str  # who compared it with a person at the other site
    compared_on: str = ""


def read_peers(folder: Path) -> dict[str, Peer]:
    path = folder / PEERS_FILE
    if not path.exists():
        return {}
    tables = read_toml(path).get("peers", [])
    peers = [read_table(Peer, f"{path}: peers", table) for table in tables]
    if len({peer.name for peer in peers}) < len(peers):
        raise SettingsError(f"{path} names a peer twice; remove one entry")
    return {peer.name: peer for peer in peers}


def add_peer(folder: Path, name: str, fingerprint: str, by: str, renew: bool = False) -> Peer:
    """Record that a person has compared a peer's fingerprint; another one of the same name needs `renew`."""
    peers, plain = read_peers(folder), normalise_fingerprint(fingerprint)
    if not by.strip():
        raise SettingsError("nobody is named; name who compared the fingerprint, e.g. --by 'A. Person'")
    if name in peers and normalise_fingerprint(peers[name].fingerprint) != plain and not renew:
        raise SettingsError(
            f"{name} is a peer with the fingerprint {peers[name].fingerprint}; if it has a new key and you have "
            "compared the new fingerprint, repeat the command with --renew"
        )
    spaced = " ".join(plain[i : i + 4] for i in range(0, 24, 4))
    peer = Peer(name, spaced, by, datetime.now(UTC).isoformat(timespec="seconds"))
    write_peers(folder, [*(other for other in peers.values() if other.name != name), peer])
    return peer


def remove_peer(folder: Path, name: str) -> None:
    peers = read_peers(folder)
    if name not in peers:
        raise unknown_name("peer", name, peers)
    write_peers(folder, [peer for peer in peers.values() if peer.name != name])


def write_peers(folder: Path, peers: Sequence[Peer]) -> None:
    tables = [vars(peer) for peer in sorted(peers, key=lambda peer: peer.name)]
    write_file(folder / PEERS_FILE, to_toml({"peers": tables}).encode(), 0o600)


def normalise_fingerprint(fingerprint: str) -> str:
    """Return the 24 hexadecimal digits of a fingerprint, however it is spaced."""
    plain = re.sub(r"[\s:-]", "", fingerprint).lower()
    if not FINGERPRINT.fullmatch(plain):
        raise SettingsError(f"a fingerprint has 24 hexadecimal digits, got {fingerprint!r}; ask the other site for it")
    return plain


def count_signers(folder: Path, federation: str, plan: Plan, own_key: str = "") -> int:
    """Count the members of a plan whose keys people here have compared, and the site itself if its key is given."""
    peers, n_signers = read_peers(folder), 0
    for member in plan.members:
        fingerprint = normalise_fingerprint(key_fingerprint(federation, member.name, member.key))
        is_peer = member.name in peers and normalise_fingerprint(peers[member.name].fingerprint) == fingerprint
        n_signers += is_peer or member.key == own_key
    return n_signers


def check_members(folder: Path, plan: Plan, site: str, public_key: str, sum_of: int) -> None:
    """Refuse a plan unless all members are this site and peers whose keys people here have compared."""
    names = plan.member_names
    if names != sorted(set(names)) or len({member.key for member in plan.members}) < len(names):
        raise RequestRefused("members", "the plan names a member or a key twice, or not in their order")
    if len(names) < sum_of:
        raise RequestRefused("sum of", least=sum_of)
    peers = read_peers(folder)
    for member in plan.members:
        if member.name == site:
            if member.key != public_key:
                raise RequestRefused("members", "the plan names another key of this site than it has")
            continue
        fingerprint = key_fingerprint(plan.federation, member.name, member.key)
        if member.name not in peers:
            raise RequestRefused(
                "members",
                f"{member.name} is not in {PEERS_FILE}; compare its fingerprint ({fingerprint}) with a person there, "
                f"then: fedvlm deploy peers {folder} --add {member.name!r} --fingerprint '...' --by 'A. Person'",
            )
        if normalise_fingerprint(peers[member.name].fingerprint) != normalise_fingerprint(fingerprint):
            raise RequestRefused(
                "members",
                f"the plan's key of {member.name} has the fingerprint {fingerprint}, but "
                f"{peers[member.name].compared_by} compared {peers[member.name].fingerprint}; if {member.name} has a "
                "new key, compare it again",
            )
    if site not in names:
        raise RequestRefused("members", "the plan does not name this site")
