"""The lock file and the page of licences have what the project asks for."""

import ast
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def names(texts):
    return {canonicalize_name(Requirement(text).name) for text in texts}


def pinned(file):
    pins = re.findall(r"^([\w.-]+)==([\w.+!-]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


def test_lock_has_every_direct_dependency_of_servers_and_sites_but_torch():
    expected = names(PROJECT["dependencies"]) | names(EXTRAS["flower"])
    assert expected - set(pinned("packaging/requirements.lock")) == {"torch"}


def test_lock_has_the_versions_of_the_constraints():
    locked, held = pinned("packaging/requirements.lock"), pinned("constraints.txt")
    assert {k: v for k, v in locked.items() if k in held and held[k] != v} == {}


def test_every_package_of_the_lock_has_hashes():
    text = (ROOT / "packaging/requirements.lock").read_text()
    blocks = re.split(r"^(?=[a-zA-Z])", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pinned("packaging/requirements.lock"))
    assert [block for block in blocks if not re.search("--hash=sha256:[0-9a-f]{64}", block)] == []


def test_page_of_licences_has_every_direct_dependency():
    page = (ROOT / "docs/reference/licences.md").read_text()
    listed = set(re.findall(r"^\| ([\w.-]+) \|", page, re.MULTILINE))
    extras = [texts for extra, texts in EXTRAS.items() if extra not in ("dev", "docs")]
    required = names(PROJECT["dependencies"]).union(*map(names, extras))
    assert required - listed == set()
    assert "not said" not in page


def test_every_package_that_is_imported_is_declared():
    declared = names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))
    homes = packages_distributions()
    missing = set()
    for folder in ("src", "tests", "tools", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "peer" in path.parts:  # other libraries, each in an environment of its own
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for module in imported:
                    distributions = {canonicalize_name(name) for name in homes.get(module.split(".")[0], [])}
                    if distributions and not distributions & (declared | {"fedvlm"}):
                        missing.add(f"{path.relative_to(ROOT)} imports {module}")
    assert not missing, "declare in pyproject.toml what is imported: " + "; ".join(sorted(missing))
