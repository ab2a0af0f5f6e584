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
from fedvlm.report.papers import numbers
from fedvlm.report.reproduce import settings_of_item
from fedvlm.runner.forecast import foreseen, needs, span
from fedvlm.runner.settings import build

SHORT = ("--set", "method.rounds=1", "--set", "method.lr=0.03")
DEMO = ("--smoke", "--data", "demo", "--encoder", "demo", *SHORT)


def invoke(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("reproduced")
    return invoke("reproduce", "fedot-v2/T3", *DEMO, "--out", out), sorted(out.iterdir())


def test_an_item_is_run_and_printed_with_a_verdict_per_number(done):
    told, runs = done
    assert told.exit_code == 0, told.output
    assert [path.name.split("-")[0] for path in runs] == ["fedlt", "fedot"]
    count = len(numbers()["fedot-v2/T3"])
    assert told.stdout.count("not comparable [1]") == count
    assert "[1] a smoke run" in told.stdout
    assert f"{count} numbers: {count} not comparable" in told.stdout
    orthogonal = [line for line in told.stdout.splitlines() if line.startswith("FedOT")]
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
    told = invoke("compare", *done[1], "--paper", "--form", form)
    assert told.exit_code == 0
    for name in Record(done[1][0]).manifest["reproduces"]:
        assert f"{name}: " in told.stdout
    assert "not comparable" in told.stdout


def test_one_item_may_be_named_and_a_csv_has_a_line_per_number(done):
    told = invoke("compare", *done[1], "--item", "fedot-v2/T3", "--form", "csv")
    rows = list(csv.DictReader(io.StringIO(told.stdout)))
    assert len(rows) == len(numbers()["fedot-v2/T3"])
    assert {row["verdict"] for row in rows} == {"not comparable"}
    assert {row["why"] for row in rows} == {"a smoke run"}


def test_a_second_time_nothing_is_run_again(done):
    told = invoke("reproduce", "fedot-v2/T3", *DEMO, "--out", done[1][0].parent)
    assert told.stderr.count("already finished") == 2


def test_a_run_of_an_experiments_folder_is_read(done, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(done[1][0], tmp_path / "runs" / "pacs" / done[1][0].name)
    told = invoke("reproduce", "fedot-v2/T3", *DEMO)
    assert told.stderr.count(f"already finished, read from runs/pacs/{done[1][0].name}") == 1


def test_a_figure_without_printed_numbers_shows_ours_with_its_columns(tmp_path):
    told = invoke("reproduce", "fedot-v1/F2", *DEMO, "--set", "method.blocks=2", "--out", tmp_path)
    assert told.exit_code == 0, told.output
    assert "nothing is printed" in told.stdout
    assert "dof" in told.stdout


def test_a_run_that_fails_is_named_and_the_table_is_printed_all_the_same(tmp_path):
    told = invoke("reproduce", "fedot-v1/F2", *DEMO, "--out", tmp_path)
    assert told.exit_code == 1  # 256 blocks do not fit into 128 dimensions
    assert told.stderr.count(" failed: ") == 2
    assert "dof" in told.stdout


def test_without_its_data_every_run_fails_and_says_where_to_get_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedVLMError, match="every run failed.*set root to"):
        invoke("reproduce", "tofa/T2", "--smoke", "--encoder", "demo")


def test_an_unknown_item_is_refused_with_the_nearest_names():
    with pytest.raises(SettingsError, match="the nearest are fedot-v1/T3, "):
        invoke("reproduce", "fedot-v1/T33")


def test_an_item_without_an_experiment_says_so(monkeypatch):
    monkeypatch.setattr("fedvlm.report.reproduce.experiments", dict)
    with pytest.raises(SettingsError, match="no experiment runs fedot-v1/T3"):
        settings_of_item("fedot-v1/T3", {})


def test_only_the_runs_of_an_item_are_run():
    """PACS's file has nineteen; table 3 consists of two."""
    named, settings = settings_of_item("fedot-v1/T3", {})
    assert named == ["femnist", "office-home", "pacs", "terra-incognita", "vlcs"]
    mine = [one.method.head for one in settings if one.data == "pacs"]
    assert mine == ["text", "random"]


@pytest.mark.parametrize("name", ["fedot-v1/T3", "faa-clip/TIII", "fedotp/T1", "tofa/T1"])
def test_needs_name_the_data_where_they_come_from_and_a_time(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, settings = settings_of_item(name, {})
    lines = needs(settings)
    for data in {one.data for one in settings}:
        (line,) = (line for line in lines if line.startswith(f"data {data}: "))
        assert "is NOT there; put " in line and "(from " in line
    assert any(line.startswith(("encoder hf:", "encoder openai:models/RN50: ")) for line in lines)
    assert "roughly " in lines[-1] and "not measured" in lines[-1]


def test_a_smoke_run_is_foreseen_to_be_shorter(monkeypatch):
    monkeypatch.setattr("fedvlm.runner.forecast._speed", lambda: 1e11)
    monkeypatch.setattr("fedvlm.runner.forecast.span", str)
    short, whole = (
        float(needs(settings_of_item("fedot-v1/T3", given)[1])[-1].split()[5].rstrip(","))
        for given in ({"smoke": True}, {})
    )
    assert 0 < 10 * short < whole


@pytest.mark.parametrize(
    ("values", "measured"),
    [
        ({"method": "fedot", "data": "pacs"}, 105),
        ({"method": "faa-clip", "data": "office-home", "protocol": "own-test"}, 96),
    ],
)
def test_the_time_foreseen_is_near_what_was_measured(values, measured):
    """By docs/papers/results-speed.md, where embeddings are there already."""
    shares = {"clients": {"ratios": [0.8, 0.0, 0.2]}} if "protocol" in values else {}
    settings = build({"encoder": "hf:openai/clip-vit-base-patch32", **values, **shares})
    assert measured / 2 < foreseen([settings], catalogue(), 1e30) < 2 * measured


def test_the_demo_has_a_time_too(monkeypatch):
    monkeypatch.setattr("fedvlm.runner.forecast._speed", lambda: 1e11)
    assert "4 trainings: roughly 2 seconds" in needs([build({"method": "zero-shot"})])[-1]
    turns = build({"method": "zero-shot", "protocol": "source-target", "target": "each"})
    assert "4 trainings" in needs([turns])[-1]


def test_a_time_is_in_its_largest_unit():
    assert [span(one) for one in (0.2, 80, 600, 9000, 400_000)] == [
        "1 seconds",
        "80 seconds",
        "10 minutes",
        "2 hours",
        "5 days",
    ]
