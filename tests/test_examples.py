"""Every example runs as a person would run it, and says what its docstring promises."""

import subprocess
import sys
from pathlib import Path

import pytest

ELSEWHERE = {"new_dataset.py"}  # run by tests/data/test_catalogue.py
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


RUN_HERE = [
    pytest.param(path, marks=[pytest.mark.slow] if path.name == "hospital.py" else [], id=path.name)
    for path in EXAMPLES
    if path.name not in ELSEWHERE
]


@pytest.mark.parametrize("path", RUN_HERE)
def test_example_runs_and_prints(path, tmp_path):
    done = subprocess.run([sys.executable, "-W", "error", path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not list(tmp_path.iterdir()), "an example left something behind"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_is_short(path):
    assert len(path.read_text().splitlines()) < 60
