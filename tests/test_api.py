"""What is public is listed on a page, and examples need nothing else."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("", ".core", ".parts", ".testing", ".data", ".encoders")
PARTS += (".evaluate.metrics", ".evaluate.protocols")
PUBLIC = [f"fedvlm{part}" for part in PARTS]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def listed():
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    return {
        module: sorted(re.findall(r"`(\w+)`", names))
        for module, names in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", page, re.M)
    }


@pytest.mark.parametrize("module", PUBLIC)
def test_the_page_lists_what_a_public_module_offers(module):
    assert listed()[module] == sorted(import_module(module).__all__)
    for name in import_module(module).__all__:
        assert getattr(import_module(module), name) is not None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_imports_nothing_that_is_not_public(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedvlm"):
            assert node.module in PUBLIC, f"{path.name} imports from {node.module}"
            offered = {*import_module(node.module).__all__, *(name.split(".")[-1] for name in PUBLIC)}
            assert {name.name for name in node.names} <= offered


def test_the_package_lists_its_names_before_they_are_used():
    fedvlm = import_module("fedvlm")
    assert set(fedvlm.__all__) <= set(dir(fedvlm))
    assert not {"import_module", "Any", "TYPE_CHECKING"} & set(dir(fedvlm))
