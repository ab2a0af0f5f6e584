"""What fedvlm takes from Flower is in one list, and all of it is there in this version."""

import ast
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

import fedvlm
from fedvlm.engines.flower import api

ROOT = Path(fedvlm.__file__).parent
LISTED = {*((module, name) for name, module in api.NAMES.items()), *api.INNER}


def touched(path: Path) -> set[str]:
    """Every module of Flower that a file imports, also by a name in a string."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            found |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    return {one for one in found if one.split(".")[0] == "flwr"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's own
@pytest.mark.parametrize(("module", "name"), sorted(LISTED), ids=lambda one: one)
def test_this_version_of_flower_has(module, name):
    api.flower()
    attrgetter(name)(import_module(module))


def test_only_two_places_import_flower_and_their_modules_are_listed():
    known = {module for module, _ in LISTED} | {"flwr.app"}
    places = {path: touched(path) for path in ROOT.rglob("*.py")}
    places = {path: found for path, found in places.items() if found}
    assert places
    for path, found in places.items():
        inside = path.relative_to(ROOT).as_posix()
        assert inside == "engines/flower/api.py" or inside.startswith("deploy/flower/"), inside
        assert found <= known, f"{inside}: {sorted(found - known)} is not in api.INNER"


def test_a_name_that_is_not_listed_is_not_given():
    with pytest.raises(AttributeError, match="'Strategy'"):
        api.Strategy  # noqa: B018
