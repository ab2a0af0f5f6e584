"""Check whether the Hugging Face Hub is reachable, since its libraries retry for minutes."""

import os
import ssl
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from fedvlm.errors import EncoderError, suggest_path

HUB_URL = "https://huggingface.co"
TIMEOUT_SECONDS = 1.8  # seconds


def unreachable_reason() -> str:
    """Return why the Hub is unreachable; empty if it is reachable, or in offline mode."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return ""  # offline: its libraries only look into their cache
    address = os.environ.get("HF_ENDPOINT") or HUB_URL
    if is_reachable(address):
        return ""
    return f"the Hub at {address} does not answer"


def is_reachable(address: str, seconds: float = TIMEOUT_SECONDS) -> bool:
    """Tell whether a server replies in time, through the proxies of the environment."""
    answered: list[bool] = []

    def send_request() -> None:
        try:
            urlopen(Request(address, method="HEAD"), timeout=seconds).close()
        except HTTPError as error:  # a reply too
            error.close()
        except URLError as error:
            if not isinstance(error.reason, ssl.SSLError):  # its libraries bring their own certificates
                return
        except (OSError, ValueError):
            return
        answered.append(True)

    request_thread = Thread(target=send_request, daemon=True)  # a DNS lookup has no timeout
    request_thread.start()
    request_thread.join(seconds)
    return bool(answered)


def is_local_only(source: str | Path) -> bool:
    """Tell whether a model is read without the Hub: from a directory, or from the cache if the Hub is unreachable."""
    path = Path(source).expanduser()
    if path.is_dir():
        return True
    if path.is_absolute() or str(source).startswith((".", "~")):
        raise EncoderError(f"there is no directory {path}; {suggest_path(path)}give a model's directory or Hub name")
    reason = unreachable_reason()
    if reason and not is_cached(str(source)):
        remedy = "check the name and the network, or give a directory that holds the model"
        raise EncoderError(f"hf:{source} cannot be opened ({reason}); {remedy}")
    return bool(reason)


def is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # not a valid model name
        return False
