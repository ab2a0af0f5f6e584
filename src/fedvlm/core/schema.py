"""Values against the annotations of dataclass fields."""

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from fedvlm.errors import SettingsError


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
