"""Read tables of settings and check them against the fields of a dataclass.

Names, types and ranges are checked, and an error names the place. A range is that of the field, or that of its name
wherever it is a setting.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from math import inf, isfinite
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from fedvlm.errors import SettingsError, unknown_name

T = TypeVar("T")
TYPE_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
LIST_NAMES = {str: "names, as ['a', 'b']", int: "whole numbers, as [0, 1]", float: "numbers, as [0.1]"}


def check_type(key: str, value: Any, annotation: Any) -> None:
    """Refuse a value that does not fit a field's annotation; an integer passes as float."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    accepted: list[str] = []
    suggestions: list[str] = []
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return
            accepted += [repr(word) for word in get_args(option)]
            suggestions += get_close_matches(str(value).lower(), map(str, get_args(option)), 1, 0.6)
        else:
            kind = get_origin(option) or option
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            inner = get_args(option) if kind is tuple else ()
            is_variadic = inner[-1:] == (...,)
            if is_variadic:
                inner = inner[:1] * (len(value) if type(value) is tuple else 1)
            if type(value) is kind and len(inner) == (len(value) if inner else 0):
                for element, part in zip(value if inner else (), inner, strict=True):
                    check_type(key, element, part)
                return
            if kind is float and is_integer:
                return
            list_name = LIST_NAMES[inner[0]] if is_variadic else f"{len(inner)} values"
            if kind is not type(None):
                accepted.append(list_name if inner else TYPE_NAMES.get(kind, f"a {kind.__name__}"))
    hint = f"; did you mean {suggestions[0]!r}?" if suggestions else ""
    raise SettingsError(f"{key} must be {' or '.join(accepted)}, got {value!r}{hint}")


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be; both ends belong to it unless it says otherwise."""

    low: float
    high: float = inf
    above: bool = False  # the number must be above `low`
    below: bool = False  # the number must be below `high`
    infinite: bool = False  # infinity is allowed

    def __contains__(self, number: float) -> bool:
        over = number > self.low if self.above else number >= self.low
        under = number < self.high if self.below else number <= self.high
        return over and under and (self.infinite or number < inf)

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.low}"
        if self.high == inf:
            return low
        if self.above or self.below:
            return f"{low} and {'below' if self.below else 'at most'} {self.high}"
        return f"between {self.low} and {self.high}"


NON_NEGATIVE = Range(0)
POSITIVE = Range(0, above=True)
COUNT = Range(1)
FRACTION = Range(0, 1, below=True)
POSITIVE_FRACTION = Range(0, 1, above=True)
OPEN_FRACTION = Range(0, 1, above=True, below=True)
UNIT = Range(0, 1)
RATE = Range(0, 1000, above=True)
DECAY = Range(0, 100)
EPOCHS = Range(1, 10_000)
BATCH = Range(1, 1_000_000_000)

# What numbers of these names may be, wherever they are set; a NaN is refused by all. A site reads
# a plan by them, so they also bound what its server may ask for.
RANGES: dict[str, Range] = {
    **dict.fromkeys(("rounds", "noise_multiplier", "mu", "rank"), NON_NEGATIVE),
    **dict.fromkeys(("eps", "shrinkage", "temperature"), POSITIVE),
    **dict.fromkeys(("min_class_samples", "min_class_clients"), COUNT),
    **dict.fromkeys(("lr", "server_lr"), RATE),
    **{"local_epochs": EPOCHS, "batch_size": BATCH, "momentum": FRACTION, "weight_decay": DECAY},
    **{"tau": Range(0, above=True, infinite=True), "n_ctx": Range(1, 1000), "iterations": Range(1, 1_000_000)},
}


def ranged_field(default: Any, range: Range) -> Any:
    """Make a field whose numbers must be in a range."""
    return field(default=default, metadata={"range": range})


def list_field(default: tuple[Any, ...] = ()) -> Any:
    """Make a field of several values, where a single one may be written without brackets."""
    return field(default=default, metadata={"several": True})


def range_of(of: Field[Any]) -> Range | None:
    """Return the range of a field: its own, or that of its name."""
    own: Range | None = of.metadata.get("range", RANGES.get(of.name))
    return own


def check_range(key: str, value: Any, range: Range | None = None) -> None:
    """Refuse a number outside the range, or outside that of the last word of its key."""
    range = range or RANGES.get(key.rpartition(".")[2])
    if range and isinstance(value, int | float) and value not in range:
        finite = "" if isfinite(value) else "finite and "
        raise SettingsError(f"{key} must be {finite}{range}, got {value!r}")


def check_ranges(title: str, settings: Any) -> None:
    """Refuse a dataclass with a number outside the range of its field."""
    for of in fields(settings):
        check_range(f"{title}.{of.name}", getattr(settings, of.name), range_of(of))


def read_value(key: str, value: Any, field_info: Field[Any]) -> Any:
    """Return a value as the field stores it; refuse a wrong type or range."""
    if get_origin(field_info.type) is tuple:
        if field_info.metadata.get("several") and isinstance(value, str | int):
            value = (value,)
        elif isinstance(value, list):
            value = tuple(value)  # TOML and JSON have lists only
    check_type(key, value, field_info.type)
    check_range(key, value, range_of(field_info))
    return value


def read_fields(title: str, instance: Any) -> None:
    """Check the fields of a dataclass in its `__post_init__`."""
    for field_info in fields(instance):
        value = read_value(f"{title}.{field_info.name}", getattr(instance, field_info.name), field_info)
        object.__setattr__(instance, field_info.name, value)


def check_settings(
    title: str, values: Mapping[str, Any], kind: Any, separator: str = ".", excluded: Any = ()
) -> dict[str, Any]:
    """Return the values of a table, checked by name, type and range; `excluded` names are unknown."""
    if not isinstance(values, Mapping):
        raise SettingsError(f"{title} = {values!r}; write a table, as {title} = {{name = value}}")
    allowed = {setting.name: setting for setting in fields(kind) if setting.name not in excluded}
    for key in values:
        if key not in allowed:
            raise unknown_name(f"setting of {title}" if title else "setting", key, allowed)
    place = f"{title}{separator}" if title else ""
    return {key: read_value(f"{place}{key}", setting, allowed[key]) for key, setting in values.items()}


def read_table(kind: type[T], title: str, values: Mapping[str, Any], separator: str = ".", **preset: Any) -> T:
    """Make a dataclass from a table and preset values; `title` names the table in errors."""
    values_by_name = check_settings(title, values, kind, separator, preset) | preset
    cls: Any = kind
    for setting in fields(cls):
        bare = setting.default is MISSING and setting.default_factory is MISSING
        if bare and setting.name not in values_by_name:
            raise SettingsError(f"{title or 'the settings'}: {setting.name} is missing; add it")
    return kind(**values_by_name)
