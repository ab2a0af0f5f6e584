"""Whether the Hugging Face Hub answers: asked first, since its libraries try for minutes."""

import os
import ssl
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from fedvlm.errors import EncoderError, nearest

HUB = "https://huggingface.co"
PATIENCE = 1.8  # seconds


def unreachable() -> str:
    """Why the Hub cannot be asked, in words; nothing if it can, or is not to be asked."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return ""  # its libraries look into their cache only, at once
    address = os.environ.get("HF_ENDPOINT") or HUB
    if answers(address):
        return ""
    return f"the Hub at {address} does not answer"


def answers(address: str, seconds: float = PATIENCE) -> bool:
    """Whether anything answers there, by the proxies of the environment, in so many seconds."""
    heard: list[bool] = []

    def ask() -> None:
        try:
            urlopen(Request(address, method="HEAD"), timeout=seconds).close()
        except HTTPError as error:  # which is an answer
            error.close()
        except URLError as error:
            if not isinstance(error.reason, ssl.SSLError):  # certificates are its libraries' own
                return
        except (OSError, ValueError):
            return
        heard.append(True)

    asking = Thread(target=ask, daemon=True)  # looking up a name knows no limit of time
    asking.start()
    asking.join(seconds)
    return bool(heard)


def only_here(source: str | Path) -> bool:
    """Whether a model is read without asking the Hub: a directory, or cached and no Hub there."""
    here = Path(source).expanduser()
    if here.is_dir():
        return True
    if here.is_absolute() or str(source).startswith((".", "~")):
        raise EncoderError(
            f"there is no directory {here}; {nearest(here)}give a model's directory or Hub name"
        )
    why = unreachable()
    if why and not cached(str(source)):
        raise EncoderError(
            f"hf:{source} cannot be opened ({why}); check the name and the network, or give a "
            "directory that holds the model"
        )
    return bool(why)


def cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # no name that a model can have
        return False
