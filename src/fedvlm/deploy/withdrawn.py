"""A site that leaves: it answers no more, and says once more what it had contributed.

The file it writes is signed by its key and holds uploads of plain sums only, as they left; what
went into a secure sum is not in it. The site is back when it has a new key and its server's word.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedvlm.core import upload_sum
from fedvlm.deploy.account import ReplyCache
from fedvlm.deploy.events import EventLog
from fedvlm.deploy.keys import Signer
from fedvlm.deploy.kits import read_site
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.membership import read_own_certificate
from fedvlm.deploy.reasons import RequestRefused
from fedvlm.engines.flower.client import to_tensors
from fedvlm.engines.flower.wire import Message, to_bytes
from fedvlm.errors import FedVLMError, SettingsError
from fedvlm.runner.settings import build
from fedvlm.storage.files import read_json, write_file, write_json

WITHDRAWN_FILE = "withdrawn.json"  # in a site's folder: who withdrew, when, and with which key
WITHDRAWAL_FILE = "withdrawal.safetensors"  # there, too: for the server
WITHDRAWAL_PREFIX = b"fedvlm withdrawal\n"  # no reply of a round is a withdrawal, nor the other way round


def withdraw(folder: Path, by: str) -> Path:
    """Ends all answers of this site from now on; the file for its server."""
    if not by.strip():
        raise SettingsError("nobody is named; say who withdraws, as --by 'A. Person'")
    kit, certificate, sign = read_site(folder), read_own_certificate(folder), Signer(folder / "key", WITHDRAWAL_PREFIX)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder / WITHDRAWN_FILE, {"by": by, "time": now, "key": sign.public.decode()})
    uploads = [reply for place in sorted((folder / "state").glob("*")) for reply in _summed_uploads(place)]
    about = {
        "kind": "withdrawal",
        "client": kit.name,
        "federation": certificate.federation,
        "uploads": [[reply.about["training"], reply.about["round"]] for reply in uploads],
    }
    all_arrays = {f"{i}/{key}": value for i, reply in enumerate(uploads) for key, value in reply.arrays.items()}
    message = sign(Message(about, all_arrays))
    data = to_bytes(message)
    Ledger(folder).add("out", -1, to_tensors(all_arrays), data, kind="withdrawal", by=by)
    write_file(folder / WITHDRAWAL_FILE, data, 0o600)
    EventLog(folder)("withdrawn", by=by, uploads=len(uploads))
    return folder / WITHDRAWAL_FILE


def _summed_uploads(place: Path) -> list[Message]:
    """What this site uploaded in a training whose uploads are plain sums."""
    try:
        spec = read_json(place / "training.json")
        settings = build(spec["identity"])
    except (OSError, FedVLMError):  # damaged, or of a method that is gone: nothing to be sent
        return []
    if upload_sum(settings.method) != "total" or "race" in spec:
        return []
    return [reply for reply in ReplyCache(place).uploads() if reply.about["kind"] == "round"]


def check_not_withdrawn(folder: Path, key: bytes) -> None:
    """Refuses everything once this site has withdrawn, until it has another key."""
    if not (folder / WITHDRAWN_FILE).exists():
        return
    try:
        record: Any = read_json(folder / WITHDRAWN_FILE)
        same = record["key"] == key.decode()
    except (FedVLMError, KeyError, TypeError):  # somebody has written it, whatever it says now
        same = True
    if same:
        raise RequestRefused("withdrawn")
