"""Type checkers know the settings of `fedvlm.run`."""

import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
SNIPPET = """
import fedvlm

fedvlm.run("fedot", rounds=3, lr=0.1, blocks=2, seeds=[0], clients={"count": 3})
fedvlm.run("fedot", roundz=3)
fedvlm.run("fedot", rounds="three")
fedvlm.sweep({"blocks": [1, 2]}, "fedot", selektion="last")
"""


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
