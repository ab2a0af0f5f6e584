"""The errors a person may cause, each saying what is wrong, the value, and the remedy."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path


class FedVLMError(Exception):
    """Anything a person can put right; the command line prints it and exits with 2."""


class SettingsError(FedVLMError):
    """A name, a type or a value in the settings."""


class DataError(FedVLMError):
    """Images, labels, manifests, embeddings or records on disk."""


class EncoderError(FedVLMError):
    """An encoder that cannot be opened, cannot be reached or does not answer as it should."""


class FederationError(FedVLMError):
    """Something that went wrong at a client or between a client and the server."""


class OutsideWarning(UserWarning):
    """An outside package that cannot be loaded; everything else goes on without it."""


def unknown(kind: str, name: str, known: Iterable[str]) -> SettingsError:
    """The refusal of a name nobody has heard of, with the nearest one that exists."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return SettingsError(f"no {kind} is called {name!r}; {hint}there is: {', '.join(names)}")


def listing(names: Sequence[str], most: int = 12) -> str:
    """Names in a message, cut where nobody reads on."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def nearest(path: Path) -> str:
    """The question whether a name beside a missing path was meant, if one is near."""
    try:
        beside = sorted(one.name for one in path.parent.iterdir())
    except OSError:
        return ""
    near = get_close_matches(path.name, beside, n=1, cutoff=0.5)
    return f"did you mean {path.parent / near[0]}? " if near else ""
