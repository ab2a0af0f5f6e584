"""What we touch of Flower's inside is on one page, and is there in the Flower that is installed."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from fedvlm.engines.flower.wire import flower

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(?m)^\| `(flwr[\w.]*)` \| (.*?) \| (.*?) \|$")


def listed():
    text = (ROOT / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")
    return {module: re.findall(r"`(\w+)`", names) for module, names, _ in LINE.findall(text)}


def touched(tree):
    """Modules of Flower that a file imports or names, and what it imports from them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr"):
            found.setdefault(node.module, set()).update(one.name for one in node.names)
        elif isinstance(node, ast.Import):
            found |= {one.name: set() for one in node.names if one.name.startswith("flwr")}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"flwr\.[\w.]+", str(node.value)):
            found.setdefault(node.value, set())
    return found


def put_names(tree):
    """Names of Flower's that we replace."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "put":
            yield from (word.arg for word in node.keywords)


def trees():
    return [ast.parse(path.read_text()) for path in sorted((ROOT / "src").rglob("*.py"))]


def test_the_page_lists_every_module_and_name_that_the_code_touches():
    known = listed()
    for tree in trees():
        for module, names in touched(tree).items():
            assert names <= set(known.get(module, ())), (module, names)
            assert module in known, module


def test_the_page_lists_nothing_that_the_code_does_not_touch():
    modules = {module for tree in trees() for module in touched(tree)}
    assert set(listed()) == modules


def test_the_page_lists_every_name_that_is_replaced():
    page = (ROOT / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")
    names = {name for tree in trees() for name in put_names(tree)}
    assert len(names) > 10 and not [name for name in names if f"`{name}`" not in page]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's own, when it is imported
@pytest.mark.parametrize("module", sorted(listed()))
def test_this_flower_has(module):
    flower()
    there = import_module(module)
    gone = [name for name in listed()[module] if not hasattr(there, name)]
    assert not gone, f"{module} of this Flower has no {', '.join(gone)}"


@pytest.mark.parametrize("unit", ["fedvlm-server", "fedvlm-site@"])
def test_a_unit_is_closed_and_starts_what_there_is(unit):
    lines = (ROOT / "units" / f"{unit}.service").read_text().splitlines()
    for wanted in (
        "NoNewPrivileges=yes",
        "PrivateTmp=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "User=fedvlm",
        "UMask=0077",
    ):
        assert wanted in lines
    [start] = [line for line in lines if line.startswith("ExecStart=")]
    assert start.split()[1:3] == ["deploy", unit.removeprefix("fedvlm-").removesuffix("@")]
