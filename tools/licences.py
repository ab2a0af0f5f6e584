"""docs/reference/licences.md: the licence of every package that fedvlm may bring, in its words.

python tools/licences.py
"""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "licences.md"
Found = dict[str, tuple[str, str, str]]  # package: version, licence, what needs it
HEAD = """# Licences of what fedvlm stands on

Made by `python tools/licences.py` from what each installed package says of itself: all that fedvlm
needs, and all that its extras but `dev` and `docs` bring. Packages that only other systems need are
not listed. The last column is the first that asks: fedvlm itself, or an extra.

| package | version | licence | needs |
|---|---|---|---|
"""


def main() -> None:
    found: Found = {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"fedvlm": project["dependencies"], **project["optional-dependencies"]}
    for why, texts in groups.items():
        if why not in ("dev", "docs"):
            walk(texts, {""}, why, found, set())
    rows = [f"| {name} | {' | '.join(found[name])} |\n" for name in sorted(found)]
    PAGE.write_text(HEAD + "".join(rows))


def walk(texts: list[str], extras: set[str], why: str, found: Found, seen: set[str]) -> None:
    """Adds what these requirements name, and what that requires in turn."""
    for one in map(Requirement, texts):
        name = canonicalize_name(one.name)
        wanted = one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)
        if not wanted or name in seen:
            continue
        seen.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:  # of another system
            continue
        found.setdefault(name, (package.version, licence(package.metadata), why))
        walk(package.requires or [], {"", *one.extras}, why, found, seen)


def licence(told: Any) -> str:
    get = told.get_all
    classes = [
        one.split(" :: ")[-1] for one in get("Classifier") or [] if one.startswith("License")
    ]
    short = [one for one in get("License") or [] if len(one) < 60 and "\n" not in one]
    words = (get("License-Expression") or []) or short or classes or ["not said"]
    return re.sub(r"\s+", " ", ", ".join(words)).replace("|", "/")


if __name__ == "__main__":
    main()
