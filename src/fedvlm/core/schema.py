"""Values against the annotations of dataclass fields, and against what their names admit."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from math import inf
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from fedvlm.errors import SettingsError, unknown


def check_type(key: str, value: Any, wanted: Any) -> None:
    """Refuses a value that a field's annotation does not admit; a whole number passes as float."""
    options = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    said = []
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return
            said += [repr(word) for word in get_args(option)]
        else:
            kind = get_origin(option) or option
            whole = isinstance(value, int) and not isinstance(value, bool)
            inner = get_args(option) if kind is tuple else ()
            if inner[-1:] == (...,):  # any number of them
                inner = inner[:1] * (len(value) if type(value) is tuple else 1)
            if type(value) is kind and len(inner) == (len(value) if inner else 0):
                for one, part in zip(value if inner else (), inner, strict=True):
                    check_type(key, one, part)
                return
            if kind is float and whole:
                return
            said.append(f"{len(inner)} values" if inner else f"a {kind.__name__}")
    raise SettingsError(f"{key} = {value!r} does not fit; it takes {' or '.join(said)}")


# What numbers of these names may be, wherever they are set; a NaN is refused by all.
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "rounds": (lambda n: n >= 0, "0 or more"),
    "epochs": (lambda n: n >= 1, "1 or more"),
    "batch": (lambda n: n >= 1, "1 or more"),
    "rate": (lambda n: 0 < n < inf, "a number above 0"),
    "server_rate": (lambda n: 0 < n < inf, "a number above 0"),
    "momentum": (lambda n: 0 <= n < 1, "a number from 0 to below 1"),
    "decay": (lambda n: 0 <= n < inf, "0 or more"),
    "eps": (lambda n: 0 < n < inf, "a number above 0"),
    "smallest": (lambda n: n >= 1, "1 or more"),
    "contributors": (lambda n: n >= 1, "1 or more"),
    "noise_multiplier": (lambda n: n >= 0, "0 or more"),
    "shrinkage": (lambda n: n > 0, "a number above 0"),
    "mu": (lambda n: 0 <= n < inf, "0 or more"),
    "tau": (lambda n: n > 0, "a number above 0"),
    "temperature": (lambda n: 0 < n < inf, "a number above 0"),
    "vectors": (lambda n: n >= 1, "1 or more"),
    "rank": (lambda n: n >= 1, "1 or more"),
    "iterations": (lambda n: n >= 1, "1 or more"),
}


def check_range(key: str, value: Any) -> None:
    """Refuses a number that the last word of its key does not admit."""
    name = key.rpartition(".")[2]
    if name in RANGES and value is not None and not RANGES[name][0](value):
        raise SettingsError(f"{key} = {value!r} does not fit; it takes {RANGES[name][1]}")


def check_settings(title: str, settings: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Settings of a dataclass by name, type and range; lists become the tuples they stand for."""
    allowed = {one.name: one for one in fields(kind)}
    out = dict(settings)
    for key, value in settings.items():
        if key not in allowed:
            raise unknown(f"setting of {title}", key, allowed)
        if isinstance(value, list) and get_origin(allowed[key].type) is tuple:
            out[key] = value = tuple(value)  # TOML and JSON have lists only
        check_type(f"{title}.{key}", value, allowed[key].type)
        check_range(f"{title}.{key}", value)
    return out
