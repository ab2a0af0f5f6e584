"""What fedvlm takes from Flower is in one list, and all of it is there in this version."""

import ast
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

import fedvlm
from fedvlm.deploy.flower.server import create_superlink
from fedvlm.engines import flower as api

ROOT = Path(fedvlm.__file__).parent
LISTED = {*((module, name) for name, module in api.PUBLIC_NAMES.items()), *api.INTERNAL_NAMES}


def touched(path: Path) -> set[str]:
    """Every module of Flower that a file imports, also by a name in a string."""
    touched_names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            touched_names |= {node_name.name for node_name in node.names}
        elif isinstance(node, ast.ImportFrom):
            touched_names.add(node.module or "")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            touched_names |= {node_name.value for node_name in node.args if isinstance(node_name, ast.Constant)}
    return {node_name for node_name in touched_names if node_name.split(".")[0] == "flwr"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's own
@pytest.mark.parametrize(("module", "name"), sorted(LISTED), ids=lambda value_id: value_id)
def test_this_version_of_flower_has(module, name):
    api.import_flower()
    if module == "flwr.proto":
        import_module(f"{module}.{name}")  # a module of its own, which the package does not import
    attrgetter(name)(import_module(module))


def test_only_two_places_import_flower_and_their_modules_are_listed():
    modules = {module for module, _ in LISTED} | {"flwr.app"}
    modules |= {f"{module}.{name}" for module, name in LISTED if module == "flwr.proto"}
    places = {path: touched(path) for path in ROOT.rglob("*.py")}
    places = {path: modules_found for path, modules_found in places.items() if modules_found}
    assert places
    for path, modules_found in places.items():
        inside = path.relative_to(ROOT).as_posix()
        assert inside == "engines/flower/__init__.py" or inside.startswith("deploy/flower/"), inside
        assert modules_found <= modules, f"{inside}: {sorted(modules_found - modules)} is not in api.INNER"


def test_at_most_twelve_inner_names_are_used_each_for_a_reason_and_none_is_replaced():
    assert len(api.INTERNAL_NAMES) <= 12 and all(api.INTERNAL_NAMES.values())
    for path in ROOT.rglob("*.py"):
        calls = {node.func.id for node in ast.walk(ast.parse(path.read_text())) if is_named_call(node)}
        assert "setattr" not in calls or "flower" not in path.as_posix(), path


def is_named_call(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_the_state_of_a_superlink_has_what_the_server_calls(tmp_path):
    state = create_superlink(tmp_path).state.linkstate_factory.state()
    assert [name for name in api.STATE_METHODS if not hasattr(state, name)] == []


def test_a_name_that_is_not_listed_is_not_given():
    with pytest.raises(AttributeError, match="'Strategy'"):
        api.Strategy  # noqa: B018
