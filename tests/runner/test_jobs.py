"""Trainings side by side: the same record as one after the other, whatever happens to one."""

import os
import signal
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path
from time import sleep

import psutil
import pytest
import torch

import fedvlm
from fedvlm.core import make
from fedvlm.encoders.store import save_store
from fedvlm.errors import DataError, FederationError
from fedvlm.record import Record
from fedvlm.runner import jobs, run
from fedvlm.runner import training as trainings
from fedvlm.runner.jobs import Job, run_jobs
from fedvlm.runner.run import execute_all
from fedvlm.runner.settings import Settings, build
from fedvlm.storage.files import is_locked

QUICK = {"name": "fedot", "rounds": 3, "lr": 1e-3, "tau": 20.0}


def names(folder):
    return {path.name for path in (folder / "trainings").iterdir()}


def test_an_experiment_has_the_same_record_on_any_number_of_processes(rows, files, tmp_path):
    methods = [make("zero-shot"), make(**QUICK), make("tofa"), make("fedavg", rounds=4)]

    def ran(workers):
        requests = [
            (Settings(entry, seeds=(0, 1), workers=workers), tmp_path / str(workers) / entry.name) for entry in methods
        ]
        lines, progress_calls = [], []
        done = execute_all(
            requests,
            embedded=rows,
            progress=lambda *all: progress_calls.append(all),
            on_line=lambda *all: lines.append(all),
        )
        assert [entry.folder for entry in done] == [place for _, place in requests]
        assert ("fedot", 18, 18) in progress_calls and ("fedavg", 24, 24) in progress_calls
        assert len(lines) == 2 * 3 * (3 + 4 + make("tofa").rounds)
        return [files(entry.folder) for entry in done]

    alone = ran(1)
    assert ran(2) == alone
    assert ran(5) == alone


def make_jobs(costs, work, workers=2, outcomes=None):
    return [
        Job(
            name=f"piece {cost}",
            record=Record(Path("nowhere")),
            cost=cost,
            workers=workers,
            is_exclusive=False,
            work=work,
            report_rounds=lambda rounds: None,
            on_done=(outcomes if outcomes is not None else []).append,
        )
        for cost in costs
    ]


def test_the_longest_training_begins_first_and_clients_share_what_is_left_over(monkeypatch):
    began, usual = [], jobs._start

    def start(job, workers, other_connections):
        began.append((job.cost, workers))
        return usual(job, workers, other_connections)

    monkeypatch.setattr(jobs, "_start", start)
    run_jobs(make_jobs([1.0, 9.0, 4.0], lambda *all: os.getpid()))
    assert began == [(9.0, 1), (4.0, 1), (1.0, 1)]
    began.clear()
    run_jobs(make_jobs([1.0, 9.0], lambda *all: os.getpid(), workers=5))
    assert began == [(9.0, 2), (1.0, 2)]


def test_short_trainings_stay_in_the_process_and_long_ones_do_not(monkeypatch):
    monkeypatch.setattr(jobs, "count_cores", lambda: 2)
    process_ids = []
    run_jobs(make_jobs([0.1, 0.2], lambda *all: os.getpid(), 0, process_ids))
    assert process_ids == [os.getpid()] * 2
    process_ids.clear()
    run_jobs(make_jobs([30.0, 20.0], lambda *all: os.getpid(), 0, process_ids))
    assert os.getpid() not in process_ids and len(set(process_ids)) == 2
    process_ids.clear()
    run_jobs(make_jobs([30.0], lambda *all: os.getpid(), 0, process_ids))
    assert process_ids == [os.getpid()]


def test_a_forecast_that_was_too_short_is_corrected_by_the_clock(monkeypatch):
    monkeypatch.setattr(jobs, "count_cores", lambda: 2)
    ticks = iter(range(0, 100, 3))
    monkeypatch.setattr(jobs, "perf_counter", lambda: next(ticks))
    process_ids = []
    run_jobs(make_jobs([0.4, 0.3, 0.2, 0.1], lambda *all: os.getpid(), 0, process_ids))
    assert [process_id == os.getpid() for process_id in process_ids] == [True, False, False, False]


def spoilt(monkeypatch, trouble):
    """The training that leaves `photo` out meets trouble; the others are as they were."""
    usual = run.train

    def train(prepared, training, record, report_rounds):
        if training.name == "photo":
            trouble(record)
        return usual(prepared, training, record, report_rounds)

    monkeypatch.setattr(run, "train", train)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_training_that_fails_is_named_and_the_others_go_on(workers, rows, files, tmp_path, monkeypatch):
    def fail(record):
        raise FederationError("no such luck")

    settings = {"embedded": rows, "seeds": [0, 1], "workers": workers}
    complete_run = fedvlm.run(QUICK, out=tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        spoilt(patch, fail)
        with pytest.raises(FederationError, match="fedot, training 0-photo: no such luck"):
            fedvlm.run(QUICK, out=tmp_path / "a", **settings)
    file_names = names(tmp_path / "a")
    assert {"0-art.json", "0-sketch.json", "1-art.json", "1-sketch.json"} <= file_names
    assert not {"0-photo.json", "1-photo.json"} & file_names
    assert not (tmp_path / "a" / "result.json").exists()
    done = fedvlm.run(QUICK, out=tmp_path / "a", **settings)
    assert files(done.folder) == files(complete_run.folder)


def test_a_run_that_fails_leaves_the_others_of_an_experiment_whole(rows, tmp_path, monkeypatch):
    def fail(record):
        if record.folder.name == "fedot":
            raise FederationError("no such luck")

    spoilt(monkeypatch, fail)
    requests = [(Settings(make(name, rounds=2), workers=2), tmp_path / name) for name in ("fedot", "fedavg")]
    bad, good = execute_all(requests, embedded=rows)
    assert isinstance(bad, FederationError) and len(good.tables) == 1


def test_a_worker_that_is_killed_is_named_and_the_run_goes_on_later(rows, files, tmp_path, monkeypatch):
    complete_run = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "whole", workers=1)
    with monkeypatch.context() as patch:
        spoilt(patch, lambda record: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(FederationError, match="training 0-photo: its process ended without"):
            fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", workers=2)
    assert "0-sketch.json" in names(tmp_path / "a")
    done = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", workers=2)
    assert files(done.folder) == files(complete_run.folder)


def test_a_disk_that_is_full_for_lines_is_said_by_their_training(rows, tmp_path, monkeypatch):
    def full(record, line):
        raise DataError("the disk is full")

    monkeypatch.setattr(Record, "add_line", full)
    with pytest.raises(DataError, match="training 0-.*: the disk is full"):
        fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", workers=2)


def test_what_a_callback_raises_ends_all_processes_and_the_run_goes_on_to_the_same_bits(
    rows, files, tmp_path, monkeypatch
):
    complete_run = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "whole", workers=1)
    monkeypatch.setattr(trainings, "CHECKPOINT_SECONDS", 0.0)

    def stop(task, done, total):
        if done == 2:  # then no process gets beyond its next line
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", workers=2, progress=stop)
    assert not active_children() and not is_locked(tmp_path / "a" / ".lock")
    assert any(name.endswith(".checkpoint") for name in names(tmp_path / "a"))
    done = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", workers=2)
    assert files(done.folder) == files(complete_run.folder)


def test_races_for_a_rate_are_the_same_side_by_side(rows, files, tmp_path):
    def ran(workers):
        run_settings = {"protocol": "own-test", "clients": "domain", "tune": ["lr"], "seeds": [0, 1]}
        out, progress_calls = tmp_path / str(workers), []
        fedvlm.run(
            {"name": "fedavg", "rounds": 4, "lr": 0.1},
            embedded=rows,
            out=out,
            workers=workers,
            progress=lambda *all: progress_calls.append(all),
            **run_settings,
        )
        assert max(rounds for task, rounds, total in progress_calls if task == "tuning") == 2 * 10
        return Record(out).manifest["tuned"], files(out)

    assert ran(1) == ran(2)


SCRIPT = """
import signal, sys
import fedvlm
signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts tests may ignore it
from fedvlm.runner import training
training.CHECKPOINT_SECONDS = 0.05
folder, store = sys.argv[1:]
settings = dict(seeds=[0, 1], encoder=f"store:{store}", selection="validation", workers=2)
fedvlm.run(dict(name="fedot", rounds=4000, lr=1e-3), out=folder, **settings)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_began_them(end, rows, tmp_path):
    store, folder = save_store(tmp_path / "rows.safetensors", rows), tmp_path / "torn"
    command = [sys.executable, "-c", SCRIPT, folder, store]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while len(list(folder.glob("trainings/*.checkpoint"))) != 2:
            assert process.poll() is None
            sleep(0.01)
        workers = psutil.Process(process.pid).children()
        process.send_signal(end)
        assert process.wait()
    finally:
        process.kill()
    assert len(workers) == 2
    assert not psutil.wait_procs(workers, 30)[1] and not is_locked(folder / ".lock")


@pytest.mark.parametrize("name", ["engine", "device"])
def test_what_a_forked_process_cannot_do_stays_in_this_one(name):
    value = {"engine": "flower", "device": "cuda"}[name]
    assert not jobs.must_run_alone(build({"method": "fedavg"}))
    assert jobs.must_run_alone(build({"method": "fedavg", name: value}))


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    auto = build({"method": "fedavg", "device": "auto"})
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        assert jobs.must_run_alone(auto) is has_gpu


def test_a_process_leaves_all_writing_of_lines_to_its_parent():
    """A record of a job's process overrides what writes lines; a rename of one of them must not be missed."""
    own = {name for name in vars(jobs._RemoteRecord) if not name.startswith("_")}
    assert own == {"add_line", "drop_lines_after"} and all(hasattr(Record, name) for name in own)
