"""Keep a site's own list of people: who may answer a request there, and how they prove who they are.

Of a password or token only a salted Scrypt hash is stored. Whoever can write the site's folder can change the list.
"""

import hmac
import json
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes, token_urlsafe
from threading import Lock
from time import sleep
from typing import Any

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from fedvlm.data.table import to_nfc
from fedvlm.deploy.operations.security_log import log_security
from fedvlm.errors import FedVLMError, SettingsError, join_names
from fedvlm.storage.files import exclusive_lock, read_json, write_file

PEOPLE_FILE = "people.json"  # in a site's folder
ROLES = {"operator": "reads, refuses and withdraws", "approver": "also consents"}
SCRYPT_COST = (1 << 15, 8, 3)  # n, r, p: 32 MB and some tenths of a second
MIN_PASSWORD_CHARS = 12
MAX_NAME_CHARS = 63
FAILURE_SECONDS = 1.0  # that a wrong password costs, one after the other
_one_login_at_a_time = Lock()


class LoginError(FedVLMError):
    """A name or a password that is not on the list."""


@dataclass(frozen=True)
class Person:
    name: str
    role: str


def read_people(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / PEOPLE_FILE
    if not path.exists():
        return {}
    people: Any = read_json(path)
    entries, keys = people.values() if isinstance(people, dict) else [None], {"role", "cost", "salt", "hash"}
    if not all(isinstance(entry, dict) and entry.keys() == keys and entry["role"] in ROLES for entry in entries):
        raise SettingsError(f"{path} is damaged; restore it from a backup, or delete it and add the people again")
    return dict(people)


def add_person(folder: Path, name: str, role: str, password: str = "") -> str:
    """Add a person, or give one a new password or role; return the token that was made if there is no password."""
    name = to_nfc(name).strip()
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise SettingsError(f"a name must have 1 to {MAX_NAME_CHARS} printable characters, got {name!r}")
    if role not in ROLES:
        raise SettingsError(f"role must be one of {', '.join(ROLES)}; got {role!r}")
    if password and len(password) < MIN_PASSWORD_CHARS:
        raise SettingsError(
            f"a password must have at least {MIN_PASSWORD_CHARS} characters, got {len(password)}; choose a longer one, "
            "or let a token be made"
        )
    token = "" if password else token_urlsafe(18)
    salt = token_bytes(16)
    entry = {"role": role, "cost": list(SCRYPT_COST), "salt": salt.hex()}
    entry["hash"] = _hash_secret(password or token, salt, SCRYPT_COST).hex()
    _change(folder, lambda people: {**people, name: entry})
    return token


def remove_person(folder: Path, name: str) -> None:
    """Remove a person from the list; what the person has consented to stays until it is withdrawn."""
    if (name := to_nfc(name).strip()) not in (people := read_people(folder)):
        raise SettingsError(f"{name!r} is not on the list; it has {join_names(list(people)) if people else 'nobody'}")
    _change(folder, lambda entries: {key: entry for key, entry in entries.items() if key != name})


def _change(folder: Path, change: Any) -> None:
    with exclusive_lock(folder / ".people.lock", "the list of people is being changed by another command; repeat"):
        text = json.dumps(change(read_people(folder)), indent=1, ensure_ascii=False)
        write_file(folder / PEOPLE_FILE, text.encode() + b"\n", 0o600)


def authenticate(folder: Path, name: str, password: str) -> Person:
    """Return the person if the password or token is right; an unknown name takes as long as a wrong password."""
    people, name = read_people(folder), to_nfc(name).strip()
    if not people:
        raise LoginError(
            "nobody is on this site's list of people; add an approver: fedvlm deploy people "
            f"{folder} --add NAME --role approver"
        )
    entry = people.get(name, {"role": "", "cost": SCRYPT_COST, "salt": "00", "hash": ""})
    with _one_login_at_a_time:
        made = _hash_secret(password, bytes.fromhex(entry["salt"]), entry["cost"]).hex()
        if hmac.compare_digest(made, entry["hash"]):
            return Person(name, entry["role"])
        log_security(folder, "login", "refused", actor=name, reason="the name or its password or token is wrong")
        sleep(FAILURE_SECONDS)
    raise LoginError(f"the name {name[:MAX_NAME_CHARS]!r} or its password or token is wrong; try again")


def _hash_secret(secret: str, salt: bytes, cost: Any) -> bytes:
    n, r, p = cost
    return Scrypt(salt=salt, length=32, n=n, r=r, p=p).derive(to_nfc(secret).encode())
