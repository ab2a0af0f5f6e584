"""Every example runs as a person would run it, and says what its docstring promises."""

import subprocess
import sys
from pathlib import Path

import pytest

ELSEWHERE = {"new_dataset.py"}  # run by tests/data/test_catalogue.py
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name not in ELSEWHERE], ids=lambda p: p.name)
def test_example_runs_and_prints(path, tmp_path):
    done = subprocess.run([sys.executable, "-W", "error", path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not list(tmp_path.iterdir()), "an example left something behind"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_is_short(path):
    assert len(path.read_text().splitlines()) < 60
