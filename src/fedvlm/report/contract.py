"""docs/reference/contract.md, made from the classes it is about.

`python -m fedvlm.report.contract` writes it.
"""

from collections.abc import Iterable
from dataclasses import fields
from inspect import getdoc, isfunction, signature
from pathlib import Path
from typing import Any

from fedvlm.core import OPTIONAL_PROTOCOLS, TRAIT_GROUPS, Schedule, Traits
from fedvlm.core.schema import range_of

OPENING = """# What a method may say

Beside its name, its settings and the six verbs ([concepts](../explanation/concepts.md)). This page
is made from `fedvlm.core`; what is not on it, nothing reads. `register` refuses a name that is
nearly one of these.
"""


def contract_page() -> str:
    """Three tables: traits, settings that engines read, and optional verbs."""
    traits = [
        (f"`{name}`", _value(field.default), field.metadata["doc"])
        for group, traits_class in {"": Traits, **TRAIT_GROUPS}.items()
        for field in fields(traits_class)
        for name in [f"{group}.{field.name}" if group else field.name]
        if name not in TRAIT_GROUPS
    ]
    settings = [
        (
            f"`{field.name}`",
            _value(field.default),
            str(range_of(field) or ""),
            field.metadata["doc"],
        )
        for field in fields(Schedule)
    ]
    verbs = [(_describe_protocol(kind), (getdoc(kind) or "").replace("\n", " ")) for kind in OPTIONAL_PROTOCOLS]
    return "\n".join(
        [
            OPENING,
            "## Traits\n",
            f"{' '.join((getdoc(Traits) or '').split())}\n",
            *_table(("trait", "if left out", "what it says"), traits),
            "\n## Settings that engines and parts read\n",
            "A method with a `loss` has the first three.\n",
            *_table(("setting", "if left out", "it takes", "what it is"), settings),
            "\n## Optional verbs\n",
            "A name without brackets is a setting that goes with the verb.\n",
            *_table(("verb", "what it gives"), verbs),
            "",
        ]
    )


def _value(default: Any) -> str:
    return "-" if default is None or default == frozenset() else f"`{default}`"


def _describe_protocol(kind: type) -> str:
    """What a protocol asks for: verbs with their arguments, settings by name."""
    members = [(name, member) for name, member in vars(kind).items() if not name.startswith("_")]
    verbs = [(name, list(signature(member).parameters)[1:]) for name, member in members if isfunction(member)]
    signatures = [f"`{name}({', '.join(words)})`" for name, words in verbs]
    return ", ".join(signatures + [f"`{name}`" for name, member in members if isinstance(member, property)])


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    Path("docs/reference/contract.md").write_text(contract_page(), encoding="utf-8")
