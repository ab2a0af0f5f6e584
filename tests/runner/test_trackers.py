"""Trackers get the record's lines, and a broken one stops nothing."""

import sys
import warnings

import pytest

import fedvlm
from fedvlm import cli
from fedvlm.encoders.store import save_store
from fedvlm.errors import SettingsError
from fedvlm.runner.trackers import Trackers, numbers

METHOD = {"name": "fedavg", "rounds": 3}


def test_callback_gets_every_line_of_the_record(rows, tmp_path):
    lines = []
    track = [lambda run, line: lines.append((run, line))]
    run = fedvlm.run(METHOD, embedded=rows, out=tmp_path / "r", track=track)
    assert [line for _, line in lines] == run.rounds
    assert {name for name, _ in lines} == {"r"}


def test_tensorboard_and_mlflow_hold_the_numbers_of_the_record(rows, tmp_path):
    pytest.importorskip("tensorboardX")
    pytest.importorskip("mlflow")
    address = f"sqlite:///{tmp_path / 'm.db'}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of mlflow's own imports
        track = [f"tensorboard:{tmp_path / 'tb'}", f"mlflow:{address}"]
        run = fedvlm.run(METHOD, embedded=rows, out=tmp_path / "r", track=track)
        from mlflow.tracking import MlflowClient

        client = MlflowClient(address)
        home = client.get_experiment_by_name("fedvlm").experiment_id
        run_ids = {mlflow_run.info.run_name: mlflow_run.info.run_id for mlflow_run in client.search_runs([home])}
        training = run.rounds[0]["training"]
        history = client.get_metric_history(run_ids[f"r/{training}"], "accuracy")
    accuracies = [line["accuracy"] for line in run.rounds if line["training"] == training]
    assert [
        mlflow_run.value for mlflow_run in sorted(history, key=lambda mlflow_run: mlflow_run.step)
    ] == pytest.approx(accuracies)
    assert len(list((tmp_path / "tb").rglob("events*"))) == len(run_ids) == 3


def test_broken_tracker_is_left_out_with_a_note_and_the_run_is_the_same(rows, tmp_path, files):
    def broken(run, line):
        raise RuntimeError("no room")

    lines = []
    track = [broken, lambda run, line: lines.append(line)]
    with pytest.warns(UserWarning, match="callback 1 failed and was dropped .*no room"):
        fedvlm.run(METHOD, embedded=rows, out=tmp_path / "a", track=track)
    fedvlm.run(METHOD, embedded=rows, out=tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert len(lines) == 9


def test_trackers_are_closed_whatever_becomes_of_the_run(rows, tmp_path, monkeypatch, capsys):
    closed = []

    class RecordingTracker:
        def __init__(self, place):
            self.place = place

        def line(self, run, line):
            raise KeyboardInterrupt

        def close(self):
            closed.append(self.place)

    monkeypatch.setattr("fedvlm.runner.trackers.TRACKER_CLASSES", {"noted": RecordingTracker})
    with pytest.raises(KeyboardInterrupt):
        fedvlm.run(METHOD, embedded=rows, out=tmp_path / "a", track=["noted:api"])
    store = f"store:{save_store(tmp_path / 'rows', rows)}"
    call = ["run", "--encoder", store, "--method", "fedavg", "--output", f"{tmp_path / 'b'}"]
    monkeypatch.setattr(sys, "argv", ["fedvlm", *call, "--track", "noted:command"])
    with pytest.raises(SystemExit):
        cli.main()
    assert closed == ["api", "command"]


def test_unknown_tracker_is_refused_before_any_work():
    with pytest.raises(SettingsError, match="did you mean 'tensorboard'"):
        Trackers(["tensorbord:x"])
    with pytest.raises(SettingsError, match="needs a folder"):
        Trackers(["tensorboard"])


def test_only_numbers_of_the_whole_training_are_tracked():
    line = {"training": "a", "round": 1, "loss": 0.5, "unseen": None, "clients": {"x": {}}}
    assert numbers(line) == {"loss": 0.5}
