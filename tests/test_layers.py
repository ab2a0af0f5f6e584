"""Imports point one way: every module imports only what stands before it in the sentence."""

import ast
from collections.abc import Iterator
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
    "channel",
    "engines",
    "evaluate",
    "record",
    "testing",
    "runner",
    "classifier",
    "report",
    "result",
    "deploy",
    "cli",
]
NAMED = {("core.registry", "methods")}  # lazy: the list of all methods is made when it is asked for
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem[0] != "_")


def name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer(module: str) -> int:
    """The longest name of the order that the module's begins with."""
    fits = [package for package in ORDER if f"{module}.".startswith(f"{package}.")]
    assert fits, f"{module} has no place in the order of layers; give it one in {__file__}"
    return ORDER.index(max(fits, key=len))


def imported(path: Path) -> Iterator[str]:
    """Every module of ours that is imported, at the top, in a function or for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        internal = (alias.removeprefix("fedvlm.") for alias in names if alias.startswith("fedvlm."))
        yield from (alias for alias in internal if not alias.startswith("__"))  # the version is no module


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_module_imports_only_what_stands_before_it(path: Path) -> None:
    module = name(path)
    wrong = [target for target in imported(path) if layer(target) > layer(module) and (module, target) not in NAMED]
    assert not wrong, f"fedvlm.{module} imports {', '.join(wrong)}, which stand after it"
