"""The errors a person may cause, each saying what is wrong, the value, and the remedy."""

from collections.abc import Iterable, Mapping, Sequence
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


# Names that settings had before they were called as in the literature, with what they are called.
FORMER: Mapping[str, tuple[str, ...]] = {
    "attackers": ("attacker_fraction",),
    "bars": ("baselines",),
    "batch": ("batch_size",),
    "by": ("partition",),
    "calibration": ("calibration_ratio",),
    "contributors": ("min_class_clients",),
    "decay": ("weight_decay",),
    "epochs": ("local_epochs",),
    "largest_upload": ("max_upload_bytes",),
    "least_rows": ("min_samples",),
    "length": ("feature_norm",),
    "minimum": ("min_samples",),
    "most": ("max_samples",),
    "most_rows": ("max_samples",),
    "noise": ("noise_multiplier",),
    "own": ("local_head", "local_vectors"),
    "passes": ("server_epochs",),
    "public": ("public_ratio",),
    "pull": ("prox_weight",),
    "rate": ("lr",),
    "rows": ("max_samples",),
    "runs": ("prompts_per_client",),
    "secure": ("verified", "plain"),
    "server_rate": ("server_lr",),
    "shared_judge": ("shared_discriminator",),
    "shares": ("ratios",),
    "smallest": ("min_class_samples",),
    "smallest_class": ("min_class_samples",),
    "start": ("ctx_init",),
    "strength": ("entropy_reg", "attack_strength"),
    "validation_shots": ("val_shots",),
    "vectors": ("n_ctx",),
    "weight": ("adaptation_weight",),
}


def renamed(name: str, known: Iterable[str]) -> str | None:
    """What a setting of a former name is called, if it is one of the known."""
    names = set(known)
    return next((new for new in FORMER.get(name, ()) if new in names), None)


def unknown_name(kind: str, name: str, known_names: Iterable[str]) -> SettingsError:
    """The refusal of a name nobody has heard of, with the nearest one that exists."""
    names = sorted(known_names)
    if new := renamed(name, names):
        return SettingsError(f"{kind} {name!r} is called {new!r}; write {new} instead")
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
