"""Values as TOML, which the standard library reads and does not write."""

import re
from collections.abc import Mapping
from json import dumps
from typing import Any

PLAIN = re.compile(r"[A-Za-z0-9_-]+")


def toml(values: Mapping[str, Any], within: str = "") -> str:
    """A table with the tables and lists of tables in it; strings as JSON, which TOML reads alike.

    What is None is left out: TOML has no word for it.
    """
    head, rest = "", ""
    for key, value in values.items():
        name = key if PLAIN.fullmatch(key) else dumps(key, ensure_ascii=False)
        place = f"{within}.{name}" if within else name
        if isinstance(value, Mapping):
            rest += f"\n[{place}]\n{toml(value, place)}"
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            rest += "".join(f"\n[[{place}]]\n{toml(one, place)}" for one in value)
        elif value is not None:
            head += f"{name} = {dumps(value, ensure_ascii=False)}\n"
    return head + rest


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested tables by dotted names."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{before}{key}.")
        else:
            out[f"{before}{key}"] = value
    return out
