"""The rows that a table is read against, on the command line."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedvlm import cli, record
from fedvlm.encoders.store import save_store
from fedvlm.record import Record

OWN_TEST = ("--set", "protocol=own-test", "--set", "clients.partition=domain", "--no-report")
BARS = ["chance", "zero-shot", "alone", "pooled"]


def rows_of(*words):
    """The table's rows by their first word, and all that was printed."""
    done = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("------"))
    last = next(i for i, line in enumerate(lines) if line.startswith(("records:", "On ")))
    return {line.split()[0]: line for line in lines[first + 1 : last]}, done.output


@pytest.fixture
def store(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return f"store:{save_store(tmp_path / 'rows.safetensors', rows)}"


def test_own_data_without_a_method_is_auto_with_four_bars(store):
    table, _ = rows_of("run", "--encoder", store, *OWN_TEST)
    assert list(table) == [*BARS, "auto"]
    assert table["chance"].split()[1] == "25.00"  # four classes
    assert table["pooled"].startswith("pooled (not federated)")


def test_no_bars_leaves_one_row(store):
    table, _ = rows_of("run", "--encoder", store, "--method", "zero-shot", "--no-baselines", *OWN_TEST)
    assert list(table) == ["zero-shot"]


def test_a_bar_that_is_asked_for_stands_there_once(store):
    _, text = rows_of("run", "--encoder", store, "--method", "alone", *OWN_TEST)
    assert text.count("\nalone ") == 1


def test_finished_bars_are_read_again_beside_another_method(store):
    words = ("run", "--encoder", store, "--method")
    rows_of(*words, "tip-adapter", "--allow-small", *OWN_TEST)
    before = {path: os.stat(path).st_mtime_ns for path in cli_results("pooled")}
    rows_of(*words, "clip-gda", "--allow-small", *OWN_TEST)
    assert len(before) == 1
    assert {path: os.stat(path).st_mtime_ns for path in cli_results("pooled")} == before


def cli_results(name):
    return sorted(Path("runs").glob(f"*/{name}-*/result.json"))


def test_without_text_there_is_no_zero_shot_bar(rows_like, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = save_store(tmp_path / "bare.safetensors", replace(rows_like(), text=None))
    table, _ = rows_of("run", "--encoder", f"store:{place}", *OWN_TEST)
    assert list(table) == ["chance", "alone", "pooled", "auto"]


@pytest.mark.parametrize(
    ("extra_lines", "has_baselines"),
    [
        ("", True),
        ("baselines = false", False),
        ('reproduces = ["fedot-v1/T1"]', False),
        ('reproduces = ["fedot-v1/T1"]\nbaselines = true', True),
        ("[paper.alone]\nown = 50.0", False),
    ],
)
def test_an_experiment_has_bars_unless_it_says_no_or_has_a_papers_table(store, extra_lines, has_baselines):
    head = f'encoder = "{store}"\nprotocol = "own-test"\nclients = "domain"\nmethod = "zero-shot"\n'
    Path("mine.toml").write_text(head + extra_lines)
    _, text = rows_of("run", "mine.toml", "--no-report")
    assert ("\nchance " in text) == ("\npooled " in text) == has_baselines


def test_bars_of_a_named_folder_lie_within_it(store, tmp_path):
    rows_of("run", "--encoder", store, "--output", tmp_path / "r", *OWN_TEST)
    assert Record(tmp_path / "r").result() is not None
    assert Record(tmp_path / "r" / "baselines" / "alone").result() is not None


def test_clients_whose_fit_has_not_converged_are_named(store, monkeypatch):
    _, text = rows_of("run", "--encoder", store, "--method", "alone", *OWN_TEST)
    assert "not converged" not in text
    monkeypatch.setattr(record, "MAX_CONVERGED_GRADIENT", -1.0)  # now every slope that is left is too large
    _, text = rows_of("run", "--encoder", store, "--method", "alone", *OWN_TEST)
    named = [line for line in text.splitlines() if line.startswith("alone: not converged at ")]
    assert len(named) == 1
    assert all(name in named[0] for name in ("art", "photo", "sketch"))
    assert any(line.startswith("pooled (not federated): not conv") for line in text.splitlines())
