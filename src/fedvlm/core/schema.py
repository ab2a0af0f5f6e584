"""The one reader of tables: what a person wrote, against the fields of a dataclass.

Names, types and ranges are checked, and a refusal says the place. A range is that of the field, or
of its name wherever it is a setting.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from difflib import get_close_matches
from math import inf
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from fedvlm.errors import SettingsError, unknown

T = TypeVar("T")
ONE = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
MANY = {str: "names, as ['a', 'b']", int: "whole numbers, as [0, 1]", float: "numbers, as [0.1]"}


def check_type(key: str, value: Any, wanted: Any) -> None:
    """Refuses a value that a field's annotation does not admit; a whole number passes as float."""
    options = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    said: list[str] = []
    near: list[str] = []
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return
            said += [repr(word) for word in get_args(option)]
            near += get_close_matches(str(value).lower(), map(str, get_args(option)), 1, 0.6)
        else:
            kind = get_origin(option) or option
            whole = isinstance(value, int) and not isinstance(value, bool)
            inner = get_args(option) if kind is tuple else ()
            any_number = inner[-1:] == (...,)
            if any_number:
                inner = inner[:1] * (len(value) if type(value) is tuple else 1)
            if type(value) is kind and len(inner) == (len(value) if inner else 0):
                for one, part in zip(value if inner else (), inner, strict=True):
                    check_type(key, one, part)
                return
            if kind is float and whole:
                return
            how_many = MANY[inner[0]] if any_number else f"{len(inner)} values"
            said.append(how_many if inner else ONE.get(kind, f"a {kind.__name__}"))
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise SettingsError(f"{key} = {value!r} does not fit; {hint}it takes {' or '.join(said)}")


Range = tuple[Callable[[float], bool], str]
AMOUNT: Range = (lambda n: 0 <= n < inf, "0 or more")
POSITIVE: Range = (lambda n: 0 < n < inf, "a number above 0")
COUNT: Range = (lambda n: n >= 1, "1 or more")
SHARE: Range = (lambda n: 0 <= n < 1, "a number from 0 to below 1")
PART: Range = (lambda n: 0 < n <= 1, "a number above 0, 1 at most")
INSIDE: Range = (lambda n: 0 < n < 1, "a number above 0 and below 1")

# What numbers of these names may be, wherever they are set; a NaN is refused by all.
RANGES: dict[str, Range] = {
    "rounds": AMOUNT,
    "local_epochs": COUNT,
    "batch_size": COUNT,
    "lr": POSITIVE,
    "server_lr": POSITIVE,
    "momentum": SHARE,
    "weight_decay": AMOUNT,
    "eps": POSITIVE,
    "min_class_samples": COUNT,
    "min_class_clients": COUNT,
    "noise_multiplier": AMOUNT,
    "shrinkage": POSITIVE,
    "mu": AMOUNT,
    "tau": (lambda n: n > 0, "a number above 0"),
    "temperature": POSITIVE,
    "n_ctx": COUNT,
    "rank": AMOUNT,
    "iterations": COUNT,
}


def within(default: Any, range: Range) -> Any:
    """A field whose numbers are held to a range; what is no number is its type's affair."""
    return field(default=default, metadata={"range": range})


def several(default: tuple[Any, ...] = ()) -> Any:
    """A field of many, where a person may write a single one without brackets."""
    return field(default=default, metadata={"several": True})


def check_range(key: str, value: Any, range: Range | None = None) -> None:
    """Refuses a number outside the range, or outside that of the last word of its key."""
    fits = range or RANGES.get(key.rpartition(".")[2])
    if fits and isinstance(value, int | float) and not fits[0](value):
        raise SettingsError(f"{key} = {value!r} does not fit; it takes {fits[1]}")


def read_value(key: str, value: Any, of: Field[Any]) -> Any:
    """A value as a field has it, refused where type or range do not fit."""
    if get_origin(of.type) is tuple:
        if of.metadata.get("several") and isinstance(value, str | int):
            value = (value,)
        elif isinstance(value, list):
            value = tuple(value)  # TOML and JSON have lists only
    check_type(key, value, of.type)
    check_range(key, value, of.metadata.get("range", RANGES.get(of.name)))
    return value


def read_fields(title: str, one: Any) -> None:
    """Holds a dataclass that was made by hand to its fields, in its `__post_init__`."""
    for of in fields(one):
        value = read_value(f"{title}.{of.name}", getattr(one, of.name), of)
        object.__setattr__(one, of.name, value)


def check_settings(
    title: str, values: Mapping[str, Any], kind: Any, between: str = ".", given: Any = ()
) -> dict[str, Any]:
    """The values of a table by name, type and range; what is `given` is no name of it."""
    if not isinstance(values, Mapping):
        raise SettingsError(f"{title} = {values!r}; write a table, as {title} = {{name = value}}")
    allowed = {one.name: one for one in fields(kind) if one.name not in given}
    for key in values:
        if key not in allowed:
            raise unknown(f"setting of {title}" if title else "setting", key, allowed)
    place = f"{title}{between}" if title else ""
    return {key: read_value(f"{place}{key}", one, allowed[key]) for key, one in values.items()}


def read_table(
    kind: type[T], title: str, values: Mapping[str, Any], between: str = ".", **given: Any
) -> T:
    """A dataclass from a table and what is `given` beside it; `title` is where the table is."""
    whole = check_settings(title, values, kind, between, given) | given
    of: Any = kind
    for one in fields(of):
        bare = one.default is MISSING and one.default_factory is MISSING
        if bare and one.name not in whole:
            raise SettingsError(f"{title or 'the settings'}: {one.name} is missing; add it")
    return kind(**whole)
