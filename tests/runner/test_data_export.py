"""`fedvlm export-data` writes what a run trained on and predicted, and the tables agree with its record."""

import csv

import numpy as np
import pytest
from typer.testing import CliRunner

import fedvlm
from fedvlm.cli import app
from fedvlm.encoders.store import open_store
from fedvlm.errors import SettingsError
from fedvlm.runner.audit import reopen_run
from fedvlm.runner.data_export import export_data


def silent(activity, done, total):
    pass


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "ridge"
    settings = {"partition": "dirichlet", "count": 3}
    return fedvlm.run("ridge", clients=settings, protocol="own-test", smoke=True, out=out, allow_small=True)


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_predictions_have_the_accuracy_of_the_record(run, tmp_path):
    paths = export_data(run.folder, tmp_path, "csv", silent)
    assert [path.name for path in paths] == ["embeddings.csv", "splits.csv", "predictions.csv"]
    lines = read(tmp_path / "predictions.csv")
    scores = next(iter(run.trainings().values()))["scores"]
    for id, score in scores.items():
        own = [line for line in lines if line["client"] == id]
        assert len(own) == score["test_rows"]
        assert sum(line["label"] == line["predicted"] for line in own) == score["test_hits"]
        for line in own[:3]:
            assert sum(float(value) for key, value in line.items() if key.startswith("p_")) == pytest.approx(1)
    splits = {(line["client"], line["row"]) for line in read(tmp_path / "splits.csv") if line["split"] == "test"}
    assert {(line["client"], line["row"]) for line in lines} == splits
    images = {line["row"]: line["path"] for line in read(tmp_path / "embeddings.csv")}
    assert all(line["path"] == images[line["row"]] != "" for line in lines)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_the_embeddings_are_read_again_as_a_store(run, tmp_path, form):
    export_data(run.folder, tmp_path, form, silent)
    again = open_store(tmp_path / f"embeddings.{form}")
    _, rows = reopen_run(run, None, silent)
    np.testing.assert_allclose(again.x, rows.x, atol=1e-6)
    assert [again.classes[y] for y in again.labels] == [rows.classes[y] for y in rows.labels]
    assert again.domains.tolist() == rows.domains.tolist()


def test_the_command_prints_its_files_and_verify_still_passes(run):
    done = CliRunner().invoke(app, ["export-data", str(run.folder), "--format", "csv"])
    assert done.exit_code == 0 and done.output.split() == [
        str(run.folder / "data" / f"{name}.csv") for name in ("embeddings", "splits", "predictions")
    ]
    assert CliRunner().invoke(app, ["verify", str(run.folder)]).exit_code == 0


def test_an_unknown_format_is_refused_before_anything_is_read(run, tmp_path):
    with pytest.raises(SettingsError, match="no format is called 'xlsx'"):
        export_data(run.folder, tmp_path / "out", "xlsx", silent)
    assert not (tmp_path / "out").exists()
