"""`fedvlm reproduce` and `compare --paper` on the embedded emoji."""

import csv
import io
import shutil

import pytest
from typer.testing import CliRunner

from fedvlm import cli
from fedvlm.data.catalogue import catalogue
from fedvlm.errors import FedVLMError, SettingsError
from fedvlm.record import Record
from fedvlm.report.papers import numbers, settings_of_item
from fedvlm.runner.forecast import describe_requirements, estimate_seconds, format_duration
from fedvlm.runner.settings import build

SHORT = ("--set", "method.rounds=1", "--set", "method.lr=0.03")
DEMO = ("--smoke", "--data", "demo", "--encoder", "demo", *SHORT)


def invoke(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("reproduced")
    return invoke("reproduce", "fedot-v2/T3", *DEMO, "--output", out), sorted(out.iterdir())


def test_an_item_is_run_and_printed_with_a_verdict_per_number(done):
    output, runs = done
    assert output.exit_code == 0, output.output
    assert [path.name.split("-")[0] for path in runs] == ["fedlt", "fedot"]
    count = len(numbers()["fedot-v2/T3"])
    assert output.stdout.count("not comparable [1]") == count
    assert "[1] a smoke run" in output.stdout
    assert f"{count} numbers: {count} not comparable" in output.stdout
    orthogonal = [line for line in output.stdout.splitlines() if line.startswith("FedOT")]
    assert orthogonal and all(line.split()[-1] == "1.00" for line in orthogonal)  # kappa


def test_it_says_first_what_it_runs_and_needs(done):
    lines = done[0].stderr.splitlines()
    assert lines[0].startswith("fedot-v2/T3 by femnist, office-home, pacs")
    assert lines[1] == "data demo: comes with fedvlm"
    assert lines[2].startswith("2 runs, ")


def test_the_manifest_keeps_what_a_run_reproduces(done):
    for path in done[1]:
        assert "fedot-v2/T3" in Record(path).manifest["reproduces"]


@pytest.mark.parametrize("form", ["text", "markdown", "latex"])
def test_finished_runs_are_compared_with_all_items_they_name(done, form):
    output = invoke("compare", *done[1], "--paper", "--format", form)
    assert output.exit_code == 0
    for name in Record(done[1][0]).manifest["reproduces"]:
        assert f"{name}: " in output.stdout
    assert "not comparable" in output.stdout


def test_one_item_may_be_named_and_a_csv_has_a_line_per_number(done):
    output = invoke("compare", *done[1], "--item", "fedot-v2/T3", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(output.stdout)))
    assert len(rows) == len(numbers()["fedot-v2/T3"])
    assert {row["verdict"] for row in rows} == {"not comparable"}
    assert {row["why"] for row in rows} == {"a smoke run"}


def test_a_second_time_nothing_is_run_again(done):
    output = invoke("reproduce", "fedot-v2/T3", *DEMO, "--output", done[1][0].parent)
    assert output.stderr.count("already finished") == 2


def test_a_run_of_an_experiments_folder_is_read(done, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(done[1][0], tmp_path / "runs" / "pacs" / done[1][0].name)
    output = invoke("reproduce", "fedot-v2/T3", *DEMO)
    assert output.stderr.count(f"already finished, read from runs/pacs/{done[1][0].name}") == 1


def test_a_figure_without_printed_numbers_shows_ours_with_its_columns(tmp_path):
    output = invoke("reproduce", "fedot-v1/F2", *DEMO, "--set", "method.blocks=2", "--output", tmp_path)
    assert output.exit_code == 0, output.output
    assert "nothing is printed" in output.stdout
    assert "dof" in output.stdout


def test_a_run_that_fails_is_named_and_the_table_is_printed_all_the_same(tmp_path):
    output = invoke("reproduce", "fedot-v1/F2", *DEMO, "--output", tmp_path)
    assert output.exit_code == 1  # 256 blocks do not fit into 128 dimensions
    assert output.stderr.count(" failed: ") == 2
    assert "dof" in output.stdout


def test_without_its_data_every_run_fails_and_says_where_to_get_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedVLMError, match="every run failed.*set root to"):
        invoke("reproduce", "tofa/T2", "--smoke", "--encoder", "demo")


def test_an_unknown_item_is_refused_with_the_nearest_names():
    with pytest.raises(SettingsError, match="the nearest are fedot-v1/T3, "):
        invoke("reproduce", "fedot-v1/T33")


def test_an_item_without_an_experiment_says_so(monkeypatch):
    monkeypatch.setattr("fedvlm.report.papers.experiments", dict)
    with pytest.raises(SettingsError, match="no experiment runs fedot-v1/T3"):
        settings_of_item("fedot-v1/T3", {})


def test_only_the_runs_of_an_item_are_run():
    """PACS's file has nineteen; table 3 consists of two."""
    named, settings = settings_of_item("fedot-v1/T3", {})
    assert named == ["femnist", "office-home", "pacs", "terra-incognita", "vlcs"]
    heads = [run_settings.method.head for run_settings in settings if run_settings.data == "pacs"]
    assert heads == ["text", "random"]


@pytest.mark.parametrize("name", ["fedot-v1/T3", "faa-clip/TIII", "fedotp/T1", "tofa/T1"])
def test_needs_name_the_data_where_they_come_from_and_a_time(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, settings = settings_of_item(name, {})
    lines = describe_requirements(settings)
    for data in {run_settings.data for run_settings in settings}:
        (line,) = (line for line in lines if line.startswith(f"data {data}: "))
        assert "is missing; put " in line and "(from " in line
    assert any(line.startswith(("encoder hf:", "encoder openai:models/RN50: ")) for line in lines)
    assert "roughly " in lines[-1] and "not measured" in lines[-1]


def test_a_smoke_run_is_foreseen_to_be_shorter(monkeypatch):
    monkeypatch.setattr("fedvlm.runner.forecast._measure_speed", lambda: 1e11)
    monkeypatch.setattr("fedvlm.runner.forecast.format_duration", str)
    short, full_time = (
        float(describe_requirements(settings_of_item("fedot-v1/T3", overrides)[1])[-1].split()[5].rstrip(","))
        for overrides in ({"smoke": True}, {})
    )
    assert 0 < 10 * short < full_time


@pytest.mark.parametrize(
    ("values", "measured"),
    [
        ({"method": "fedot", "data": "pacs"}, 105),
        ({"method": "faa-clip", "data": "office-home", "protocol": "own-test"}, 96),
    ],
)
def test_the_time_foreseen_is_near_what_was_measured(values, measured):
    """By docs/papers/appendix.md, where embeddings are there already."""
    client_settings = {"clients": {"ratios": [0.8, 0.0, 0.2]}} if "protocol" in values else {}
    settings = build({"encoder": "hf:openai/clip-vit-base-patch32", **values, **client_settings})
    assert measured / 2 < estimate_seconds([settings], catalogue(), 1e30) < 2 * measured


def test_the_demo_has_a_time_too(monkeypatch):
    monkeypatch.setattr("fedvlm.runner.forecast._measure_speed", lambda: 1e11)
    assert "4 trainings: roughly 2 seconds" in describe_requirements([build({"method": "zero-shot"})])[-1]
    turns = build({"method": "zero-shot", "protocol": "source-target", "target": "each"})
    assert "4 trainings" in describe_requirements([turns])[-1]


def test_a_time_is_in_its_largest_unit():
    assert [format_duration(seconds) for seconds in (0.2, 80, 600, 9000, 400_000)] == [
        "1 seconds",
        "80 seconds",
        "10 minutes",
        "2 hours",
        "5 days",
    ]
