"""Values as TOML, which the standard library reads and does not write."""

import re
from collections.abc import Mapping
from json import dumps
from typing import Any

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(values: Mapping[str, Any], prefix: str = "") -> str:
    """A table with the tables and lists of tables in it; strings as JSON, which TOML reads alike.

    What is None is left out: TOML has no word for it.
    """
    head, rest = "", ""
    for key, value in values.items():
        name = key if BARE_KEY.fullmatch(key) else dumps(key, ensure_ascii=False)
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            rest += f"\n[{path}]\n{to_toml(value, path)}"
        elif isinstance(value, list) and value and all(isinstance(table, Mapping) for table in value):
            rest += "".join(f"\n[[{path}]]\n{to_toml(table, path)}" for table in value)
        elif value is not None:
            head += f"{name} = {dumps(value, ensure_ascii=False)}\n"
    return head + rest


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted names."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
