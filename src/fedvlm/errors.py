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


class DataWarning(UserWarning):
    """A property of the data that makes a run unreliable, such as a client with a single class.

    Example:
        >>> import warnings, fedvlm
        >>> warnings.simplefilter("ignore", fedvlm.DataWarning)
    """


class OutsideWarning(UserWarning):
    """An outside package that cannot be loaded; everything else goes on without it."""


def unknown_name(kind: str, name: str, known_names: Iterable[str]) -> SettingsError:
    """The refusal of a name nobody has heard of, with the nearest one that exists."""
    names = sorted(known_names)
    matches = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {matches[0]!r}? " if matches else ""
    return SettingsError(f"no {kind} is called {name!r}; {hint}there is: {', '.join(names)}")


def join_names(names: Sequence[str], max_names: int = 12) -> str:
    """Names in a message, cut where nobody reads on."""
    rest = len(names) - max_names
    return ", ".join(names[:max_names]) + (f" and {rest} more" if rest > 0 else "")


def suggest_path(path: Path) -> str:
    """The question whether a name beside a missing path was meant, if one is near."""
    try:
        siblings = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ""
    matches = get_close_matches(path.name, siblings, n=1, cutoff=0.5)
    return f"did you mean {path.parent / matches[0]}? " if matches else ""
