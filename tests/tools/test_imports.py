"""A script that is kept must at least open: what it imports exists."""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
NEEDS_MORE = {"demo/art.py"}  # resvg_py, which only drawing the demo's images needs
SCRIPTS = {"build_demo.py": ".", "papers": "papers"}  # called by path: their folder is searched
FILES = sorted(path.relative_to(TOOLS) for path in TOOLS.rglob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("file", [f for f in FILES if f.as_posix() not in NEEDS_MORE], ids=str)
def test_tool_opens(file, monkeypatch):
    sibling = SCRIPTS.get(file.parts[0])
    monkeypatch.syspath_prepend(TOOLS / sibling if sibling else TOOLS.parent)
    before = set(sys.modules)
    monkeypatch.setattr(sys, "argv", [file.name])
    try:
        importlib.import_module(file.stem if sibling else ".".join(("tools", *file.with_suffix("").parts)))
    finally:
        if sibling:  # names such as `fedot` are no one else's business
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(TOOLS)):
                    del sys.modules[name]
