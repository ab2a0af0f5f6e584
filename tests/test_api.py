"""What is public is listed on a page, and examples need nothing else."""

import ast
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from fedvlm.core import methods
from fedvlm.core.registry import METHODS
from fedvlm.runner.settings import SETTING_NAMES
from fedvlm.runner.typed_settings import MethodSettings, RunSettings

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


def test_the_typed_settings_are_those_of_the_registry():
    ours = [methods()[name] for name in methods() if METHODS[name].__module__.startswith("fedvlm.methods")]
    names = {setting.name for kind in ours for setting in fields(kind)} - {"text"}  # a parameter of run itself
    listed = set(MethodSettings.__annotations__)
    assert listed == names - SETTING_NAMES, "add new settings of methods to fedvlm/runner/typed_settings.py"
    assert set(RunSettings.__annotations__) - listed == SETTING_NAMES - {"method"}
