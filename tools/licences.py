"""docs/reference/licences.md: the licence of every package that fedvlm may bring, in its words.

.venv/encoders/bin/python tools/licences.py, after make test-encoders
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
Packages = dict[str, tuple[str, str, str]]  # package: version, licence, what needs it
HEAD = """# Licences of what fedvlm stands on

Made by `python tools/licences.py` from what each installed package says of itself: all that fedvlm
needs, and all that its extras but `dev` and `docs` bring
(`make test-encoders` creates an environment with all). Packages that only other systems need are not listed.
The last column is the first that asks: fedvlm itself, or an extra.

| package | version | licence | needs |
|---|---|---|---|
"""


def main() -> None:
    packages: Packages = {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"fedvlm": project["dependencies"], **project["optional-dependencies"]}
    for group, texts in groups.items():
        if group not in ("dev", "docs"):
            collect_requirements(texts, {""}, group, packages, set())
    rows = [f"| {name} | {' | '.join(packages[name])} |\n" for name in sorted(packages)]
    PAGE.write_text(HEAD + "".join(rows))


def collect_requirements(texts: list[str], extras: set[str], group: str, packages: Packages, visited: set[str]) -> None:
    """Adds what these requirements name, and what that requires in turn."""
    for requirement in map(Requirement, texts):
        name = canonicalize_name(requirement.name)
        is_needed = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in extras)
        if not is_needed or name in visited:
            continue
        visited.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:  # of another system
            continue
        packages.setdefault(name, (package.version, licence(package.metadata), group))
        collect_requirements(package.requires or [], {"", *requirement.extras}, group, packages, visited)


def licence(metadata: Any) -> str:
    get = metadata.get_all
    classes = [entry.split(" :: ")[-1] for entry in get("Classifier") or [] if entry.startswith("License")]
    short = [entry for entry in get("License") or [] if len(entry) < 60 and "\n" not in entry]
    words = (get("License-Expression") or []) or short or classes or ["not said"]
    return re.sub(r"\s+", " ", ", ".join(words)).replace("|", "/")


if __name__ == "__main__":
    main()
