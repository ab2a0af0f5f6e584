"""Announce a few events to an address of the operator's choice (`webhook` in server.toml or site.toml).

A message holds no secret, no reason and nothing of the samples. Its failure never delays or stops a run.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any
from urllib.parse import urlsplit

import httpx

from fedvlm.errors import FedVLMError, SettingsError
from fedvlm.runner.experiment_files import read_toml

ANNOUNCEMENTS = {  # by the event of the log: the name of the message and its sentence
    "ended": ("run finished", "the run {method} has finished"),
    "failed": ("run failed", "the run {method} has stopped; see: fedvlm deploy status"),
    "missing": ("site late", "site {site} did not answer in round {round}"),
    "asks": ("consent asked", "the server asks for {method}; a person has to decide: fedvlm deploy consent"),
}
FIELDS = ("site", "round", "rounds", "method", "training")  # of an event that a message may hold
TRIES = 3
TIMEOUT_SECONDS = 5.0  # of one try
RETRY_SECONDS = 2.0  # before the second try; twice as long before the third


def check_webhook(address: str) -> str:
    """Return the address if a message can be sent to it."""
    parts = urlsplit(address)
    if address and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise SettingsError("webhook must be an address such as https://chat.example.org/hooks/TOKEN")
    return address


class Webhook:
    """Send the announcements of one folder, each in the background."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.late_sites, self.method = folder, set[str](), ""

    def announce(self, event: Mapping[str, Any]) -> None:
        """Send a message about an event that is worth one; a late site is announced until it answers again."""
        kind, site = event["kind"], str(event.get("site", ""))
        self.method = str(event.get("method", self.method))
        self.late_sites -= set(event.get("there", ()))
        if kind not in ANNOUNCEMENTS or (kind == "missing" and site in self.late_sites):
            return
        self.late_sites |= {site} if kind == "missing" else set()
        file = next((path for path in (self.folder / "server.toml", self.folder / "site.toml") if path.exists()), None)
        with suppress(FedVLMError, OSError):  # it is being written, or is not valid: whoever reads it next says so
            settings = read_toml(file) if file else {}
            if address := check_webhook(str(settings.get("webhook", ""))):
                sender = f"site {settings['name']}" if "name" in settings else "the server"
                name, sentence = ANNOUNCEMENTS[kind]
                facts = {"method": self.method, **{key: event[key] for key in FIELDS if key in event}}
                text = " ".join(f"fedvlm, {sender}: {sentence.format_map({'round': '?', **facts})}".split())
                message = {"event": name, "time": event["time"], "from": sender, **facts, "text": text}
                Thread(target=send_message, args=(address, message)).start()  # the process ends after its last try


def send_message(address: str, message: Mapping[str, Any]) -> bool:
    """Send a message; retry a few times, and tell the process's log without the address, which may be a secret."""
    problem = ""
    for number in range(TRIES):
        sleep(RETRY_SECONDS * number)
        try:
            # A proxy would read a plain address, which may be a secret; TLS goes through it unread.
            is_encrypted = address.startswith("https:")
            answer = httpx.post(address, json=dict(message), timeout=TIMEOUT_SECONDS, trust_env=is_encrypted)
            if answer.is_success:
                return True
            problem = f"HTTP {answer.status_code}"
        except Exception as error:  # whatever a library raises: a message is never worth a run
            problem = type(error).__name__
    host = urlsplit(address).hostname
    sys.stderr.write(f"the webhook at {host} did not take a message ({problem}), {TRIES} tries\n")
    return False
