"""Type checkers know the settings of `fedvlm.run`, and the list they read is the registry's."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from fedvlm.core import methods
from fedvlm.core.registry import METHODS
from fedvlm.runner.settings import SETTING_NAMES
from fedvlm.runner.typed_settings import MethodSettings, RunSettings

SRC = Path(__file__).parents[2] / "src"
SNIPPET = """
import fedvlm

fedvlm.run("fedot", rounds=3, lr=0.1, blocks=2, seeds=[0], clients={"count": 3})
fedvlm.run("fedot", roundz=3)
fedvlm.run("fedot", rounds="three")
fedvlm.sweep({"blocks": [1, 2]}, "fedot", selektion="last")
"""


def test_the_typed_settings_are_those_of_the_registry():
    ours = [methods()[name] for name in methods() if METHODS[name].__module__.startswith("fedvlm.methods")]
    names = {setting.name for kind in ours for setting in fields(kind)} - {"text"}  # a parameter of run itself
    listed = set(MethodSettings.__annotations__)
    assert listed == names - SETTING_NAMES, "add new settings of methods to fedvlm/runner/typed_settings.py"
    assert set(RunSettings.__annotations__) - listed == SETTING_NAMES - {"method"}


def test_mypy_refuses_a_misspelt_setting_and_a_wrong_type(tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "use.py"
    script.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--no-error-summary", script.name]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path)],
        cwd=tmp_path,
        env={"MYPYPATH": str(SRC), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("use.py")]
    assert [line.split(":")[1] for line in lines if "error" in line] == ["5", "6", "7"], done.stdout + done.stderr
    assert 'Unexpected keyword argument "roundz"' in lines[0]
