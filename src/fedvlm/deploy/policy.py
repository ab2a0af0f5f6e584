"""What a site allows, in a file the site owns; it is enforced there, whatever the server asks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedvlm.core import check_type
from fedvlm.deploy.reasons import Refused
from fedvlm.errors import SettingsError, unknown
from fedvlm.runner.settings import read_toml
from fedvlm.storage.files import write

NAME, CONSENT = "policy.toml", "consent.json"
EXAMPLE = """\
# What this site allows; the server cannot change it. As it stands, all is allowed.
methods = []          # methods that may run here, as ["fedot"]; empty: all
smallest_class = 1    # training rows a class must have, if it has any
largest_upload = 0    # bytes of one message to the server; 0: any
clip = 0.0            # the channel must clip to this norm or a smaller one; 0: it need not clip
noise = 0.0           # the channel's noise multiplier must be this or more
consent = false       # true: no round starts without a person's consent (fedvlm deploy consent)
"""


class Protection(Protocol):
    """What a policy asks of a channel: how it clips and how much noise it adds."""

    @property
    def clip(self) -> float: ...
    @property
    def noise(self) -> float: ...


@dataclass(frozen=True)
class Policy:
    methods: tuple[str, ...] = ()  # the methods that may run here; empty: all
    smallest_class: int = 1  # training rows a class must have, if it has any
    largest_upload: int = 0  # bytes of one message to the server; 0: any
    clip: float = 0.0  # the channel must clip to this norm or a smaller one; 0: it need not clip
    noise: float = 0.0  # the channel's noise multiplier must be this or more
    consent: bool = False  # no round starts without a person's consent (`fedvlm deploy consent`)

    def admit(
        self,
        folder: str | Path,
        method: str,
        channel: Protection,
        labels: NDArray[np.int64],
    ) -> None:
        """Refuses a round before anything is computed. `labels` are those of the training rows."""
        if self.methods and method not in self.methods:
            raise Refused(
                "method",
                f"the method {method} is not allowed here, only {', '.join(self.methods)}",
            )
        if self.clip and not 0 < channel.clip <= self.clip:
            raise Refused(
                "clip",
                f"channel.clip = {channel.clip:g}, but this site wants its change clipped to "
                f"{self.clip:g} or less",
                most=self.clip,
            )
        if channel.noise < self.noise:
            raise Refused(
                "noise",
                f"channel.noise = {channel.noise:g}, but this site wants {self.noise:g} or more",
                least=self.noise,
            )
        counts = np.bincount(labels, minlength=1)
        if ((counts > 0) & (counts < self.smallest_class)).any():  # which and how few is not said
            raise Refused("class", least=self.smallest_class)
        if self.consent:
            check_consent(Path(folder), method)

    def release(self, size: int) -> None:
        """Refuses to let a message of this many bytes leave."""
        if self.largest_upload and size > self.largest_upload:
            raise Refused("upload", bytes=size, most=self.largest_upload)


def read_policy(folder: str | Path) -> Policy:
    """The policy of a site's folder; without the file, all is allowed."""
    path = Path(folder) / NAME
    if not path.exists():
        return Policy()
    values = read_toml(path)
    known = {one.name: one for one in fields(Policy)}
    for key, value in values.items():
        if key not in known:
            raise unknown(f"setting of {path.name}", key, known)
        if key == "methods":
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise SettingsError(f"{path}: methods = {value!r}; write names, as ['fedot']")
            values[key] = tuple(value)
            continue
        check_type(f"{path}: {key}", value, known[key].type)
        if value < 0:
            raise SettingsError(f"{path}: {key} = {value} is negative; 0 asks for nothing")
    return Policy(**values)


def give_consent(
    folder: str | Path, by: str, methods: Sequence[str] = (), days: float = 1.0
) -> datetime:
    """Notes that a person agrees to rounds of these methods (none: all) for some days from now."""
    if not by.strip():
        raise SettingsError("nobody is named; say who consents, as --by 'A. Person'")
    if not days > 0:
        raise SettingsError(f"days = {days}; consent lasts for more than 0 days")
    now = datetime.now(UTC)
    until = now + timedelta(days=days)
    told = {
        "by": by,
        "methods": list(methods),
        "given": now.isoformat(timespec="seconds"),
        "until": until.isoformat(timespec="seconds"),
    }
    write(Path(folder) / CONSENT, json.dumps(told, indent=1, ensure_ascii=False).encode() + b"\n")
    return until


def withdraw_consent(folder: str | Path) -> None:
    """No round starts from here on; one that has begun is not called back."""
    (Path(folder) / CONSENT).unlink(missing_ok=True)


def check_consent(folder: Path, method: str) -> None:
    if not (folder / CONSENT).exists():
        raise Refused("consent")
    try:
        told = json.loads((folder / CONSENT).read_text())
        until, methods = datetime.fromisoformat(told["until"]), list(told["methods"])
        over = datetime.now(UTC) > until
    except (KeyError, TypeError, ValueError) as error:
        raise Refused("consent damaged") from error
    if over:
        raise Refused("consent ended", f"the consent given at this site ended at {told['until']}")
    if methods and method not in methods:
        raise Refused(
            "consent method", f"the consent given at this site is not for the method {method}"
        )
