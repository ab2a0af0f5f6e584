"""What a worker of a cluster does, in this process: rows and checkpoints are found, or sent."""

from dataclasses import replace

import pytest
import torch

import fedvlm
from fedvlm.encoders.store import open_store, save_store
from fedvlm.record import Record
from fedvlm.runner import cluster, training
from fedvlm.runner.jobs import Job, JobSpec
from fedvlm.runner.run import execute_all
from fedvlm.runner.settings import build
from tests.helpers.counting import Counting, numbered, run


def ordered(out, store, method, **settings):
    """A run on this machine, and its first training as a worker is told of it."""
    made = fedvlm.run(method, encoder=f"store:{store}", out=out, **settings)
    run_settings = build(made.manifest["identity"])
    name = made.manifest["trainings"][0]
    rows = open_store(store)
    order = JobSpec(run_settings, rows, 0, name)
    return made, order


def worked(order, folder, manifest, progress=((), ()), place=None):
    training = cluster.WorkerTraining(order.settings, order.seed, order.training)
    files = (list(progress[0]), dict(progress[1]))
    return cluster.run_on_worker(training, order.rows, place, folder, manifest, files)


def plain(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def check_left(made, order, lines, files):
    """What a worker gives back is what the run has of this training."""
    name = f"{order.seed}-{order.training}"
    recorded_lines = [line for line in made.rounds if line["training"] == name]
    assert plain(lines) == plain(recorded_lines)
    folder = made.folder / "trainings"
    assert files == {path.name: path.read_bytes() for path in folder.glob(f"{name}.*")}


METHOD = {"name": "fedot", "rounds": 4, "lr": 1e-3}


@pytest.fixture
def store(rows_like, tmp_path):
    return save_store(tmp_path / "rows.safetensors", rows_like())


@pytest.fixture
def stopped(monkeypatch):
    """Every round has a checkpoint; a training stops after two of them until it is let go."""
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    write, done = training.write_tensors, []

    def count(path, *args):
        write(path, *args)
        done.append(path)
        if len(done) == 2 and path.suffix == ".checkpoint":
            raise RuntimeError("the worker is lost")

    monkeypatch.setattr(training, "write_tensors", count)
    return done


def test_a_lost_training_goes_on_in_the_folder_that_both_workers_see(store, tmp_path, stopped):
    stopped += [None] * 5
    made, order = ordered(tmp_path / "here", store, METHOD, protocol="own-test")
    run = tmp_path / "run"
    Record(run).start({key: value for key, value in made.manifest.items() if key != "format"})
    manifest = Record(run).manifest
    stopped.clear()
    with pytest.raises(RuntimeError, match="the worker is lost"):
        worked(order, run, manifest)
    name = f"0-{order.training}"
    assert (run / "away" / name / "trainings" / f"{name}.checkpoint").exists()
    lines, files, _ = worked(order, run, manifest)
    assert len(stopped) == 2 + 2 + 2  # checkpoints of rounds 1, 2, 3 and 4, the outcome and novelty
    check_left(made, order, lines, files)
    job = piece_of(Record(run), order)
    assert cluster._store_result(job, lines, files, "fine") == "fine"
    assert not (run / "away").exists()
    assert plain(Record(run).lines()) == plain(lines)


def piece_of(record, order):
    return Job("one", record, 1.0, 1, False, lambda *args: None, print, print, order)


def test_a_training_that_was_stopped_is_sent_with_its_checkpoint(store, tmp_path, stopped):
    stopped += [None] * 5
    made, order = ordered(tmp_path / "here", store, METHOD, protocol="own-test")
    stopped.clear()
    with pytest.raises(RuntimeError, match="the worker is lost"):
        fedvlm.run(METHOD, encoder=f"store:{store}", protocol="own-test", out=tmp_path / "run")
    record, lines_heard = Record(tmp_path / "run"), []
    progress = cluster._saved_progress(piece_of(record, order))
    assert len(progress[0]) == 2 and len(progress[1]) == 1
    lines, files, scores = worked(order, tmp_path / "elsewhere", record.manifest, progress)
    assert len(stopped) == 2 + 2 + 2 and not (tmp_path / "elsewhere").exists()
    check_left(made, order, lines, files)
    record = Record(tmp_path / "run", lambda *line: lines_heard.append(line))
    cluster._store_result(piece_of(record, order), lines, files, scores)
    assert len(lines_heard) == 2 and record.lines() == lines  # nobody hears of a round twice


def test_one_machine_goes_on_with_what_a_lost_cluster_left(store, tmp_path, stopped, files):
    stopped += [None] * 5
    settings = {"encoder": f"store:{store}", "protocol": "own-test"}
    made, order = ordered(tmp_path / "here", store, METHOD, protocol="own-test")
    run = tmp_path / "run"
    Record(run).start({key: value for key, value in made.manifest.items() if key != "format"})
    stopped.clear()
    with pytest.raises(RuntimeError, match="the worker is lost"):
        worked(order, run, Record(run).manifest)
    fedvlm.run(METHOD, **settings, out=run)
    assert len(stopped) == 2 + 2 + 2 and not list((run / "away").glob("*"))
    assert files(run) == files(made.folder)


def test_trainings_on_images_stay_on_the_machine_of_the_command(rows, tmp_path, monkeypatch):
    def nobody(on):
        raise AssertionError("a cluster was asked")

    monkeypatch.setattr(cluster, "_client", nobody)
    outcomes = []
    order = JobSpec(build({"method": "lora"}), replace(rows, images=object()), 0, "all")
    job = replace(piece_of(Record(tmp_path), order), work=lambda *args: "trained", on_done=outcomes.append)
    cluster.run_jobs([job], "dask")
    assert outcomes == ["trained"]


def test_a_folder_of_another_run_is_not_worked_in(store, tmp_path):
    made, order = ordered(tmp_path / "here", store, METHOD, protocol="own-test")
    other_manifest = {**made.manifest, "rows": "others"}
    lines, files, _ = worked(order, made.folder, other_manifest)
    check_left(made, order, lines, files)
    assert not (made.folder / "away").exists()


def test_a_worker_prepares_base_to_new_from_all_classes(store, tmp_path, monkeypatch):
    jobs = []
    monkeypatch.setattr(cluster, "run_jobs", lambda submitted, on: jobs.extend(submitted))
    run_options = {"encoder": f"store:{store}", "protocol": "base-to-new"}
    method = {"name": "fedclip", "rounds": 2}
    execute_all([(build({"method": method, **run_options}), tmp_path / "there")], cluster="dask")
    made = fedvlm.run(method, **run_options, out=tmp_path / "here")
    lines, files, _ = worked(jobs[0].spec, tmp_path / "nowhere", made.manifest)
    check_left(made, jobs[0].spec, lines, files)


def test_rows_are_read_where_a_worker_sees_the_store(store, rows_like, tmp_path):
    made, order = ordered(tmp_path / "here", store, METHOD, protocol="own-test")
    bare, place = cluster.strip_samples(order.settings, order.rows)
    assert len(bare.x) == 0 and cluster.path_exists(place)
    order = replace(order, rows=bare)
    lines, files, _ = worked(order, tmp_path / "nowhere", made.manifest, place=place)
    check_left(made, order, lines, files)
    cluster._open_tables.clear()
    save_store(store, rows_like(seed=1))
    for lost in (place, replace(place, path=tmp_path / "gone.npz")):
        with pytest.raises(cluster.SamplesNotVisible):
            worked(order, tmp_path / "nowhere", made.manifest, place=lost)


@pytest.mark.parametrize("patches", [False, True])
def test_rows_are_read_where_a_worker_sees_the_cache(patches, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path))
    rows = run(numbered(20), Counting(), tmp_path, patches=patches).embedded
    settings = build({"method": "fedot"})
    some = replace(rows, x=rows.x[::3], content=rows.content[::3])
    some = replace(some, patches=rows.patches[::3] if patches else None)
    bare, place = cluster.strip_samples(settings, some)
    cluster._open_tables.clear()
    samples = cluster.load_samples(bare, place)
    assert torch.equal(samples.x, some.x)
    assert not patches or torch.equal(samples.patches, some.patches)
    assert cluster.load_samples(bare, place).x is samples.x  # read once
    cluster._open_tables.clear()
    assert cluster.load_samples(replace(bare, content=["00" * 32]), place) is None
    assert cluster.load_samples(bare, replace(place, encoder="ffff")) is None
    assert cluster.load_samples(bare, replace(place, digest="other")) is None
    assert not cluster._open_tables
