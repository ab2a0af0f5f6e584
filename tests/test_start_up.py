"""What a process does not import, because nobody waits for it gladly."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fedvlm.cli import app
from fedvlm.encoders.store import save_store

GRADIENTS = """
import sys
import torch
import fedvlm

g = torch.Generator().manual_seed(0)
def units(n):
    return torch.nn.functional.normalize(torch.randn(n, 16, generator=g), dim=1)
rows = {id: (units(24), torch.arange(24) % 3) for id in "ab"}
told = dict(clients=rows, classes=("x", "y", "z"), text=units(3), rounds=2)
for name in sys.argv[1:]:
    for engine in ("batched", "single"):
        fedvlm.run(name, engine=engine, **told)

from fedvlm.runner import run

def train(*given, usual=run.train):
    found = usual(*given)
    assert torch.get_num_threads() == 1 and "torch._dynamo" not in sys.modules
    return found

run.train = train
fedvlm.run("fedgh", workers=2, seeds=[0, 1], **told)
assert "torch._dynamo" not in sys.modules
assert "_dynamo" not in vars(torch)
assert not torch._dynamo.is_compiling()
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch.func.grad(lambda x: (x * x).sum())(torch.ones(2)).tolist() == [2, 2]
"""


def run(script, *args, **kwargs):
    done = subprocess.run([sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True, **kwargs)
    assert not done.returncode, done.stderr
    return done.stdout


IMPORTS = """
import importlib, pkgutil, sys, threading
import torch

before = {name: getattr(torch, name) for name in ("get_num_threads", "get_default_dtype", "is_grad_enabled")}
before = {name: read() for name, read in before.items()}
names, threads = set(vars(torch)), threading.active_count()
import fedvlm
for module in ("tensors", "core", "methods", "parts", "maths", "channel", "engines", "evaluate", "runner", "testing"):
    package = importlib.import_module(f"fedvlm.{module}")
    for info in pkgutil.iter_modules(getattr(package, "__path__", [])):
        if info.name != "flower":
            importlib.import_module(f"fedvlm.{module}.{info.name}")
assert "_dynamo" not in set(vars(torch)) - names, "torch._dynamo is replaced for the whole process"
assert before == {name: getattr(torch, name)() for name in before}
assert threads == threading.active_count()
"""


def test_importing_fedvlm_changes_nothing_in_the_process():
    run(IMPORTS)


def test_a_gradient_imports_no_compiler_in_any_process_and_leaves_it_to_those_who_compile():
    run(GRADIENTS, "fedadapter", "fedgh")


COMMAND = """
import sys
from fedvlm.cli import app

app(sys.argv[1:], standalone_mode=False)
assert "numpy" in sys.modules
assert "torch" not in sys.modules
"""

FILE = """
title = "A table"
encoder = "store:{store}"
traffic = true
baselines = false

[[methods]]
name = "fedot"
rounds = 2

[[methods]]
name = "tofa"
"""


@pytest.fixture
def experiment(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = save_store(tmp_path / "rows.safetensors", rows)
    (tmp_path / "mine.toml").write_text(FILE.format(store=store))
    return ["run", "mine.toml"]


def imported_by(*words):
    done = CliRunner().invoke(app, words)
    assert not done.exit_code, done.output
    return done.stdout


def test_a_finished_experiment_is_shown_again_without_torch(experiment, tmp_path):
    first = imported_by(*experiment)
    assert "A table" in first and "fedot" in first and "report: " in first
    assert run(COMMAND, *experiment) == first
    assert run(COMMAND, *experiment, "--format", "csv") == imported_by(*experiment, "--format", "csv")


@pytest.mark.parametrize("options", [[], ["--columns", "balanced,worst,method.rounds", "--all"]])
def test_runs_are_compared_without_torch(options, experiment):
    imported_by(*experiment)
    assert run(COMMAND, "compare", "runs/mine", *options) == imported_by("compare", "runs/mine", *options)


def test_what_was_shown_is_not_shown_for_another_question_or_other_records(experiment, tmp_path):
    first = imported_by(*experiment)
    assert imported_by(*experiment, "--set", "seeds=[1]") != first
    assert imported_by(*experiment) == first  # and is asked for anew
    text = (tmp_path / "mine.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    assert "rounds=3" in imported_by(*experiment)
    for path in (tmp_path / "runs" / "mine").glob("fedot*/index.json"):
        path.write_text("{}")
    assert "rounds=3" in imported_by(*experiment)
