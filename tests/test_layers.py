"""Imports point one way, between packages and between modules; imports inside functions count too."""

import ast
from pathlib import Path

import pytest

import fedvlm

ROOT = Path(fedvlm.__file__).parent
ORDER = [
    "errors",
    "plugins",
    "seeds",
    "machine",
    "devices",
    "hub",
    "tensors",
    "storage",
    "core",
    "maths",
    "parts",
    "methods",
    "data",
    "encoders",
    "evaluate.metrics",
    "evaluate.findings",
    "channel",
    "engines",
    "evaluate",
    "record",
    "testing",
    "runner",
    "classifier",
    "report",
    "result",
    "estimator",
    "serving",
    "deploy",
    "cli",
]
# The list of all methods is made when it is asked for: the registry imports the methods, which import the registry.
EXCEPTIONS = {("core.registry", "methods")}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


# The package's own __init__ and __main__ look names up in other modules only when they are used.
PATHS = {module_name(path): path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT or path.stem[0] != "_"}


def layer_of(module: str) -> int:
    """Return the place in the order of the longest name that the module's begins with."""
    packages = [package for package in ORDER if f"{module}.".startswith(f"{package}.")]
    assert packages, f"fedvlm.{module} has no place in the order of layers; give it one in {__file__}"
    return ORDER.index(max(packages, key=len))


def imported_modules(module: str) -> set[str]:
    """Return our modules that a module imports: at the top, in a function or for types alone."""
    names: list[str] = []
    for node in ast.walk(ast.parse(PATHS[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"fedvlm.{module} imports relatively; write the full name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    internal = {name.removeprefix("fedvlm.") for name in names if name.startswith("fedvlm.")}
    targets = {name if name in PATHS else name.rpartition(".")[0] for name in internal}
    return {target for target in targets & PATHS.keys() if (module, target) not in EXCEPTIONS} - {module}


IMPORTS = {module: imported_modules(module) for module in PATHS}


@pytest.mark.parametrize("module", PATHS)
def test_a_module_imports_only_what_stands_before_it(module: str) -> None:
    later = sorted(target for target in IMPORTS[module] if layer_of(target) > layer_of(module))
    assert not later, f"fedvlm.{module} imports {', '.join(later)}, which stand after it"


def test_no_modules_import_each_other_in_a_circle() -> None:
    finished: set[str] = set()

    def visit(module: str, chain: tuple[str, ...]) -> None:
        assert module not in chain, "a circle of imports: " + " -> ".join([*chain[chain.index(module) :], module])
        if module not in finished:
            for target in sorted(IMPORTS[module]):
                visit(target, (*chain, module))
            finished.add(module)

    for module in IMPORTS:
        visit(module, ())


def test_every_exception_is_used() -> None:
    for module, target in EXCEPTIONS:
        assert f"import fedvlm.{target}" in PATHS[module].read_text(encoding="utf-8")
