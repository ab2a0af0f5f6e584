"""One folder per experiment: its runs, their table, what was asked, and the page."""

import csv
import io
import json
import tomllib

import pytest
from typer.testing import CliRunner

from fedvlm import cli
from fedvlm.encoders.store import save_store
from fedvlm.evaluate.metrics import METRICS
from fedvlm.record import Record
from fedvlm.report.runs import runs_in
from fedvlm.report.verify import verify_files
from fedvlm.storage.files import to_toml

EXPERIMENT = """title = "Two methods"
protocol = "own-test"
clients = "domain"
seeds = [0, 1]
[[methods]]
name = "fedavg"
rounds = 1
[[methods]]
name = "zero-shot"
"""


def call(*words):
    done = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def place(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = save_store(tmp_path / "clinic.safetensors", rows)
    (tmp_path / "mine.toml").write_text(f'encoder = "store:{store}"\n' + EXPERIMENT)
    return tmp_path


def test_an_experiment_has_one_folder_with_all_that_belongs_to_it(place):
    call("run", "mine.toml")
    home = place / "runs" / "mine"
    files = sorted(path.name for path in home.iterdir() if path.is_file())
    assert files == [".shown.json", "mine.toml", "report.html", "table.json", "table.md"]
    names = [path.name.split("-clinic-")[0] for path in runs_in(home)]
    assert names == ["alone", "pooled", "fedavg", "zero-shot"]  # bars first, as in the table
    assert [path.name for path in (place / "runs").iterdir()] == ["mine"]
    text = (home / "table.md").read_text()
    assert text.startswith("# Two methods\n\n| method") and "| chance" in text


def test_its_table_has_numbers_for_programs(place):
    call("run", "mine.toml", "--no-report")
    home = place / "runs" / "mine"
    document = json.loads((home / "table.json").read_text())
    runs = [Record(home / entry) for entry in document["runs"]]
    for row, run in zip(document["table"], runs, strict=True):
        own_table = [table["own"] for table in run.tables]
        assert row["own"]["mean"] == pytest.approx(sum(own_table) / 2)
        assert row["seeds"] == 2
    assert {entry["metric"] for entry in document["scores"]} == set(METRICS)


def test_what_was_asked_is_asked_again_by_its_own_file(place):
    call("run", "mine.toml", "--set", "method.rounds=1", "--method", "fedavg", "--no-report")
    file = place / "runs" / "mine" / "mine.toml"
    experiment = tomllib.loads(file.read_text())
    assert experiment["method"] == {"name": "fedavg", "rounds": 1} and "methods" not in experiment
    done = call("run", file, "--no-report")
    assert "already finished, read from runs/mine/fedavg-clinic-" in done.stderr
    assert tomllib.loads(file.read_text()) == experiment


def test_own_data_have_a_folder_with_the_tuning_written_down(place):
    data = ("run", "--encoder", "store:clinic.safetensors", "--set", "protocol=own-test")
    quick = (
        "--set",
        "clients.partition=domain",
        "--set",
        "method.rounds=1",
        "--no-report",
        "--no-baselines",
    )
    call(*data, *quick, "--method", "fedavg", "--tune", "lr")
    file = place / "runs" / "clinic" / "clinic.toml"
    assert tomllib.loads(file.read_text())["tune"] == ["lr"]
    assert "already finished" in call("run", file, "--no-report").stderr


def test_other_settings_do_not_clash_in_an_experiments_folder(place):
    call("run", "mine.toml", "--no-report", "--no-baselines", "--method", "zero-shot")
    call("run", "mine.toml", "--no-report", "--no-baselines", "--method", "zero-shot", "--smoke")
    assert len(runs_in(place / "runs" / "mine")) == 2


def test_compare_and_report_take_an_experiments_folder(place):
    output = call("run", "mine.toml", "--no-report").stdout
    head, rule, _, *rows = output.split("On the clients")[0].splitlines()[3:]
    again = call("compare", "runs/mine").stdout.splitlines()
    assert [line.split() for line in again] == [cells.split() for cells in (head, rule, *rows)][:6]
    call("report", "runs/mine")
    assert (place / "runs" / "mine" / "report.html").exists()


@pytest.mark.parametrize("form", ["csv", "json"])
def test_long_form_has_a_line_per_seed_client_and_metric(place, form):
    done = call("run", "mine.toml", "--no-report", "--no-baselines", "--format", form)
    output = call("compare", "runs/mine", "--format", form).stdout
    assert done.stdout == output  # nothing else stands on stdout
    lines = json.loads(output) if form == "json" else list(csv.DictReader(io.StringIO(output)))
    assert len(lines) == 2 * 2 * 3 * len(METRICS)  # methods, seeds, clients
    tables = Record(runs_in(place / "runs" / "mine")[0]).tables
    for seed in (0, 1):
        matching = [
            float(entry["value"])
            for entry in lines
            if entry["metric"] == "accuracy"
            and str(entry["seed"]) == str(seed)
            and entry["method"].startswith("fedavg")
        ]
        assert sum(matching) / 3 == pytest.approx(tables[seed]["own"], abs=1e-6)


def test_a_run_that_was_run_again_into_its_folder_is_sound(place):
    words = ("run", "mine.toml", "--method", "fedavg", "--output", "r")
    call(*words)
    call(*words, "--force")
    assert verify_files("r")[1] == []


@pytest.mark.parametrize(
    "values",
    [
        {"a": 1, "b": {"c": 'x"y\n', "d e": [1, 2.5e-7]}, "m": [{"n": "é"}, {"n": True}]},
        {"paper": {"their row (1)": {"G": 12.5}}, "title": "x"},
    ],
)
def test_toml_is_read_back_as_written(values):
    assert tomllib.loads(to_toml(values)) == values
