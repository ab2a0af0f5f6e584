"""`--import FILE` makes methods of a script known to a command."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedvlm.errors import SettingsError
from fedvlm.plugins import import_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "new_method.py"


def call(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "fedvlm", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_a_method_of_a_script_runs_and_is_exported(tmp_path):
    settings = ["--set", "clients.partition=dirichlet", "--set", "clients.count=3", "--set", "protocol=own-test"]
    command = ["run", "--import", EXAMPLE, "--method", "fedbias", "--smoke", "--no-baselines", "--no-report"]
    done = call(*command, *settings, "-o", "run", cwd=tmp_path)
    assert done.returncode == 0 and "fedbias" in done.stdout, done.stderr
    client = next(iter(__import__("fedvlm").Result(tmp_path / "run").manifest["clients"]))
    assert call("export", "run", "out", "--client", client, cwd=tmp_path).returncode == 2  # not known without it
    done = call("export", "run", "out", "--client", client, "--import", EXAMPLE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_missing_file_and_a_broken_one_are_refused_with_the_reason(tmp_path):
    with pytest.raises(SettingsError, match="there is no such Python file"):
        import_file(tmp_path / "nothing.py")
    broken = tmp_path / "broken_script_of_a_user.py"
    broken.write_text("1 / 0")
    with pytest.raises(SettingsError, match="failed with ZeroDivisionError: division by zero; correct the file"):
        import_file(broken)
    taken = tmp_path / "json.py"
    taken.write_text("")
    with pytest.raises(SettingsError, match="a module 'json' is loaded already; rename the file"):
        import_file(taken)
