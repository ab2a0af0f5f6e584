"""A command as a person calls it, and what it refuses."""

import sys

import pytest

from fedvlm import cli


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs a command as `main` does and returns the error; the exit code must be 2."""

    def invoke(*words):
        monkeypatch.setattr(sys, "argv", ["fedvlm", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        return capsys.readouterr().err

    return invoke
