"""Whether the Hugging Face Hub answers: asked first, since its libraries try for minutes."""

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
    """Why the Hub cannot be asked, in words; nothing if it can, or is not to be asked."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return ""  # its libraries look into their cache only, at once
    address = os.environ.get("HF_ENDPOINT") or HUB_URL
    if is_reachable(address):
        return ""
    return f"the Hub at {address} does not answer"


def is_reachable(address: str, seconds: float = TIMEOUT_SECONDS) -> bool:
    """Whether anything answers there, by the proxies of the environment, in so many seconds."""
    answered: list[bool] = []

    def send_request() -> None:
        try:
            urlopen(Request(address, method="HEAD"), timeout=seconds).close()
        except HTTPError as error:  # which is an answer
            error.close()
        except URLError as error:
            if not isinstance(error.reason, ssl.SSLError):  # certificates are its libraries' own
                return
        except (OSError, ValueError):
            return
        answered.append(True)

    request_thread = Thread(target=send_request, daemon=True)  # looking up a name knows no limit of time
    request_thread.start()
    request_thread.join(seconds)
    return bool(answered)


def is_local_only(source: str | Path) -> bool:
    """Whether a model is read without asking the Hub: a directory, or cached and no Hub there."""
    path = Path(source).expanduser()
    if path.is_dir():
        return True
    if path.is_absolute() or str(source).startswith((".", "~")):
        raise EncoderError(f"there is no directory {path}; {suggest_path(path)}give a model's directory or Hub name")
    reason = unreachable_reason()
    if reason and not is_cached(str(source)):
        raise EncoderError(
            f"hf:{source} cannot be opened ({reason}); check the name and the network, or give a "
            "directory that holds the model"
        )
    return bool(reason)


def is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # no name that a model can have
        return False
