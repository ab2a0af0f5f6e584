"""A person's consent to rounds at a site, for some methods and some days."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedvlm.deploy.reasons import RequestRefused
from fedvlm.errors import SettingsError
from fedvlm.storage.files import write_file

CONSENT_FILE = "consent.json"


def give_consent(folder: str | Path, by: str, methods: Sequence[str] = (), days: float = 1.0) -> datetime:
    """Notes that a person agrees to rounds of these methods (none: all) for some days from now."""
    if not by.strip():
        raise SettingsError("nobody is named; say who consents, as --by 'A. Person'")
    if not days > 0:
        raise SettingsError(f"days = {days}; consent lasts for more than 0 days")
    now = datetime.now(UTC)
    until = now + timedelta(days=days)
    consent = {
        "by": by,
        "methods": list(methods),
        "given": now.isoformat(timespec="seconds"),
        "until": until.isoformat(timespec="seconds"),
    }
    write_file(Path(folder) / CONSENT_FILE, json.dumps(consent, indent=1, ensure_ascii=False).encode() + b"\n")
    return until


def withdraw_consent(folder: str | Path) -> None:
    """No round starts from here on; one that has begun is not called back."""
    (Path(folder) / CONSENT_FILE).unlink(missing_ok=True)


def refuse_consent(folder: str | Path, by: str, reason: str) -> None:
    """Notes that a person refuses; the server learns that, and not why."""
    if not by.strip():
        raise SettingsError("nobody is named; say who refuses, as --by 'A. Person'")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    refusal = {"by": by, "refused": now, "reason": reason}
    write_file(Path(folder) / CONSENT_FILE, json.dumps(refusal, indent=1, ensure_ascii=False).encode())


def check_consent(folder: Path, method: str) -> None:
    if not (folder / CONSENT_FILE).exists():
        raise RequestRefused("consent")
    try:
        consent = json.loads((folder / CONSENT_FILE).read_text())
        if "refused" in consent:
            raise RequestRefused("consent refused", f"{consent['by']} has refused: {consent['reason']}")
        until, methods = datetime.fromisoformat(consent["until"]), list(consent["methods"])
        over = datetime.now(UTC) > until
    except (KeyError, TypeError, ValueError) as error:
        raise RequestRefused("consent damaged") from error
    if over:
        raise RequestRefused("consent ended", f"the consent given at this site ended at {consent['until']}")
    if methods and method not in methods:
        raise RequestRefused("consent method", f"the consent given at this site is not for the method {method}")
