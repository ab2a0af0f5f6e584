"""Every example runs as a person would run it, and says what its docstring promises."""

import json
import subprocess
import sys
import warnings
from copy import deepcopy
from pathlib import Path

import pytest

from fedvlm.errors import DataWarning
from tools.notebook import NOTEBOOK, execute

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


def test_the_notebook_runs_and_shows_what_it_stored():
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    made = deepcopy(stored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        execute(made)
    kinds = [[output["output_type"] for output in cell.get("outputs", [])] for cell in made["cells"]]
    assert kinds == [[output["output_type"] for output in cell.get("outputs", [])] for cell in stored["cells"]]
    drawn = [output["data"] for cell in made["cells"] for output in cell.get("outputs", []) if "data" in output]
    assert any("image/png" in data for data in drawn)
    assert NOTEBOOK.stat().st_size < 100_000, "store small pictures"
    assert str(Path.home()) not in NOTEBOOK.read_text(encoding="utf-8")
