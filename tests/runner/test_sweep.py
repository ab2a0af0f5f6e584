"""A grid over settings: which points it has, what it refuses, and that one failure stays one."""

import json
import os
import tomllib

import pytest
from typer.testing import CliRunner

import fedvlm
from fedvlm import cli
from fedvlm.encoders.store import save_store
from fedvlm.errors import FedVLMError, SettingsError
from fedvlm.runner.experiments import experiment_runs, read_grid, read_sweep, split_outcomes, swept_grid
from fedvlm.runner.settings import build

FEDOT = {"method": {"name": "fedot", "rounds": 1}}


def points(values, key):
    return [entry["method"].get(key) for entry in experiment_runs(values)]


def test_a_grid_has_every_pair_of_values():
    grid_runs = experiment_runs({**FEDOT, "sweep": {"method.blocks": [1, 2], "clients.shots": [4, 8, 16]}})
    pairs = [(entry["method"]["blocks"], entry["clients"]["shots"]) for entry in grid_runs]
    assert pairs == [(1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16)]
    assert all(entry["method"]["rounds"] == 1 for entry in grid_runs)


def test_dotted_and_quoted_names_are_the_same():
    assert read_grid({"method": {"blocks": [1, 2]}}) == read_grid({"method.blocks": [1, 2]})


def test_every_method_keeps_its_own_settings_and_one_without_a_swept_one_is_there_once():
    values = {
        "methods": [{"name": "zero-shot"}, {"name": "fedot", "lr": 0.1}],
        "sweep": {"method.blocks": [1, 2]},
    }
    assert [entry["method"]["name"] for entry in experiment_runs(values)] == ["zero-shot", "fedot", "fedot"]
    assert points(values, "lr") == [None, 0.1, 0.1]


def test_a_setting_that_is_set_is_not_swept():
    values = {**FEDOT, "sweep": {"method.blocks": [1, 2], "fraction": [0.5, 1.0]}}
    grid_runs = experiment_runs(values, ["method.blocks=4"])
    assert [(entry["method"]["blocks"], entry["fraction"]) for entry in grid_runs] == [(4, 0.5), (4, 1.0)]
    assert list(swept_grid(values, ["method.blocks=4"])) == ["fraction"]


def test_encoder_target_and_seeds_can_be_swept():
    values = {**FEDOT, "protocol": "source-target"}
    over = {"encoder": ["demo", "hf:x"], "target": ["a", "b"], "seeds": [3, 4]}
    settings = [build(entry) for entry in experiment_runs({**values, "sweep": over})]
    assert len(settings) == 8
    assert {entry.seeds for entry in settings} == {(3,), (4,)}
    assert {entry.target for entry in settings} == {("a",), ("b",)}


def test_the_command_line_reads_toml_or_words():
    assert read_sweep(["a.b=1,2,3", "c=noto, twemoji"]) == {
        "a.b": [1, 2, 3],
        "c": ["noto", "twemoji"],
    }
    assert read_sweep(["seeds=[0, 1],[2]"]) == {"seeds": [[0, 1], [2]]}


@pytest.mark.parametrize("text", ["a.b", "a.b=", "=1,2"])
def test_a_sweep_without_name_or_values_is_refused(text):
    with pytest.raises(SettingsError, match="is not of the form a.b=1,2,3"):
        read_sweep([text])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, "auto"], r"mixed types, 1 \(number\) and 'auto' \(str\)"),
        ([True, 1], "mixed types"),
        ([1, 2, 1], "has a value twice"),
        ([], "must be a list of values"),
        (4, "must be a list of values"),
    ],
)
def test_values_that_make_no_sweep_are_refused(values, message):
    with pytest.raises(SettingsError, match=message):
        experiment_runs({**FEDOT, "sweep": {"method.blocks": values}})


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("method.block", "method.blocks"),
        ("clients.shot", "clients.shots"),
        ("encoders", "encoder"),
        ("reproduces", None),  # decides no number
        ("method.gamma", None),  # of another method
    ],
)
def test_a_sweep_over_a_setting_that_does_not_exist_is_refused(key, suggestion):
    with pytest.raises(SettingsError, match=f"no setting to sweep is called '{key}'") as error:
        experiment_runs({**FEDOT, "sweep": {key: [1, 2]}})
    assert suggestion is None or f"did you mean '{suggestion}'" in str(error.value)


def test_a_point_that_fails_is_named_and_the_others_go_on():
    settings = [build(entry) for entry in experiment_runs({**FEDOT, "sweep": {"method.blocks": [1, 3, 4]}})]

    outcomes = [0, ValueError("no"), 2]
    done, failed = split_outcomes(settings, outcomes, ["method.blocks"])
    assert (done, failed) == ([0, 2], ["fedot at method.blocks=3 failed: ValueError: no"])
    with pytest.raises(ValueError, match="no"):
        split_outcomes(settings, outcomes)  # no sweep: the first failure ends it
    assert split_outcomes(settings, outcomes, keep_going=True) == ([0, 2], ["fedot failed: ValueError: no"])
    with pytest.raises(FedVLMError, match="every run failed; the first: fedot at method.blocks=3"):
        split_outcomes(settings[1:2], outcomes[1:2], ["method.blocks"])


@pytest.fixture
def store(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return f"store:{save_store(tmp_path / 'rows.safetensors', rows)}"


def sweep(store, *words):
    command = ["run", "--encoder", store, "--method", "fedot", "--no-baselines", "--no-report"]
    command += ["--set", "method.rounds=1", "--set", "method.lr=0.1", *words]
    return CliRunner().invoke(cli.app, command, catch_exceptions=False)


def test_the_table_has_a_column_per_swept_setting_and_the_exit_code_tells_of_failures(store):
    words = ("--sweep", "method.blocks=1,3,4", "--sweep", "clients.shots=4,8")
    output = sweep(store, *words, "--output", "here")
    assert output.exit_code == 1
    assert "fedot at method.blocks=3, clients.shots=4 failed: blocks = 3 does not" in output.output
    lines = [line.split() for line in output.stdout.splitlines()]
    head = next(line for line in lines if line[:1] == ["method"])
    assert head[1:3] == ["method.blocks", "clients.shots"]
    rows = [line for line in lines if line[:1] == ["fedot"]]
    assert [row[-6:-4] for row in rows] == [["1", "4"], ["1", "8"], ["4", "4"], ["4", "8"]]
    assert all("blocks=" not in " ".join(row) for row in rows)


def test_finished_points_are_not_run_again_when_the_grid_grows(store, tmp_path):
    assert sweep(store, "--sweep", "method.blocks=1,2", "--output", "here").exit_code == 0
    before = {path: os.stat(path).st_mtime_ns for path in tmp_path.glob("here/*/result.json")}
    assert len(before) == 2
    assert sweep(store, "--sweep", "method.blocks=4,2,1", "--output", "here").exit_code == 0
    after = {path: os.stat(path).st_mtime_ns for path in tmp_path.glob("here/*/result.json")}
    assert len(after) == 3 and before.items() < after.items()


def test_a_sweep_lies_in_its_experiments_folder_whose_file_asks_for_it_again(store, tmp_path):
    output = sweep(store, "--sweep", "method.blocks=1,2", "--set", "protocol=own-test")
    assert output.exit_code == 0, output.output
    home = tmp_path / "runs" / "rows"
    points = sorted(path.parent.name for path in home.glob("*/result.json"))
    assert len(points) == 2 and all(name.startswith("fedot-rows-") for name in points)
    table = json.loads((home / "table.json").read_text())
    assert [row["method.blocks"] for row in table["table"]] == [1, 2]
    assert {score["method.blocks"] for score in table["scores"]} == {1, 2}
    experiment = tomllib.loads((home / "rows.toml").read_text())
    assert experiment["sweep"] == {"method.blocks": [1, 2]}
    command = ["run", str(home / "rows.toml"), "--no-report"]
    again = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert again.stderr.count("already finished, read from runs/rows/fedot-rows-") == 2
    assert tomllib.loads((home / "rows.toml").read_text()) == experiment


def test_points_of_a_sweep_race_for_their_rate_all_or_none(store, tmp_path):
    words = [
        "run",
        "--encoder",
        store,
        "--method",
        "fedot",
        "--no-baselines",
        "--no-report",
        "--set",
    ]
    words += ["protocol=own-test", "--sweep", "method.rounds=0,1"]
    assert CliRunner().invoke(cli.app, words, catch_exceptions=False).exit_code == 0
    for path in tmp_path.glob("runs/rows/*/manifest.json"):
        assert "tuned" not in json.loads(path.read_text())  # nothing is raced for in no round
    assert "tune" not in tomllib.loads((tmp_path / "runs" / "rows" / "rows.toml").read_text())


def test_a_value_no_method_takes_is_refused_before_anything_runs(store, tmp_path):
    with pytest.raises(SettingsError, match="at method.local_epochs=1, method.lr=-1: fedot.lr must be above 0"):
        sweep(store, "--sweep", "method.local_epochs=1,2", "--sweep", "method.lr=1,-1")
    assert not (tmp_path / "runs").exists()


def test_a_sweep_in_python_gives_a_data_frame(rows, tmp_path):
    with pytest.warns(UserWarning, match="fedot at method.blocks=3 failed"):
        frame = fedvlm.sweep(
            {"blocks": [1, 3, 4]},
            "fedot",
            rounds=1,
            embedded=rows,
            out=tmp_path,
            columns=["dof"],
        )
    assert frame["method.blocks"].tolist() == [1, 4]
    assert frame["dof"].tolist() == [16 * 15 / 2, 4 * 4 * 3 / 2]
    assert {"G", "P", "C", "G std"} <= set(frame)
    assert len(frame.attrs["failed"]) == 1
