"""A site that leaves: it answers no more, and says once more what it had contributed.

The file it writes is signed by its key and holds uploads of plain sums only, as they left; what
went into a secure sum is not in it. The site is back when it has a new key and its server's word.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedvlm.core import sums
from fedvlm.deploy.account import Given
from fedvlm.deploy.events import Events
from fedvlm.deploy.keys import Signer
from fedvlm.deploy.kits import read_site
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.membership import own
from fedvlm.deploy.reasons import Refused
from fedvlm.engines.flower.client import unpack
from fedvlm.engines.flower.wire import Parcel, to_bytes
from fedvlm.errors import FedVLMError, SettingsError
from fedvlm.runner.settings import build
from fedvlm.storage.files import write
from fedvlm.storage.sealed import read_json, write_json

NOTE = "withdrawn.json"  # in a site's folder: who withdrew, when, and with which key
FILE = "withdrawal.safetensors"  # there, too: for the server
PREFIX = b"fedvlm withdrawal\n"  # no reply of a round is a withdrawal, nor the other way round


def withdraw(folder: Path, by: str) -> Path:
    """Ends all answers of this site from now on; the file for its server."""
    if not by.strip():
        raise SettingsError("nobody is named; say who withdraws, as --by 'A. Person'")
    kit, standing, sign = read_site(folder), own(folder), Signer(folder / "key", PREFIX)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder / NOTE, {"by": by, "time": now, "key": sign.public.decode()})
    uploads = [one for place in sorted((folder / "state").glob("*")) for one in _sums_of(place)]
    about = {
        "kind": "withdrawal",
        "client": kit.name,
        "federation": standing.federation,
        "uploads": [[one.about["training"], one.about["round"]] for one in uploads],
    }
    whole = {
        f"{i}/{key}": value for i, one in enumerate(uploads) for key, value in one.arrays.items()
    }
    parcel = sign(Parcel(about, whole))
    data = to_bytes(parcel)
    Ledger(folder).add("out", -1, unpack(whole), data, kind="withdrawal", by=by)
    write(folder / FILE, data, 0o600)
    Events(folder)("withdrawn", by=by, uploads=len(uploads))
    return folder / FILE


def _sums_of(place: Path) -> list[Parcel]:
    """What this site uploaded in a training whose uploads are plain sums."""
    try:
        spec = read_json(place / "training.json")
        settings = build(spec["identity"])
    except (OSError, FedVLMError):  # damaged, or of a method that is gone: nothing to be sent
        return []
    if sums(settings.method) != "total" or "race" in spec:
        return []
    return [one for one in Given(place).uploads() if one.about["kind"] == "round"]


def check_withdrawn(folder: Path, key: bytes) -> None:
    """Refuses everything once this site has withdrawn, until it has another key."""
    if not (folder / NOTE).exists():
        return
    try:
        noted: Any = read_json(folder / NOTE)
        same = noted["key"] == key.decode()
    except (FedVLMError, KeyError, TypeError):  # somebody has written it, whatever it says now
        same = True
    if same:
        raise Refused("withdrawn")
