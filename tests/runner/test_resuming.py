"""A run that was killed, or whose disk was full, goes on to the same bits."""

import errno
import os
import random
import subprocess
import sys
from time import sleep

import pytest

import fedvlm
from fedvlm.encoders.store import save_store
from fedvlm.engines import batched, loop
from fedvlm.engines import state as states
from fedvlm.errors import DataError, SettingsError
from fedvlm.runner import training as trainings
from fedvlm.tensors import max_relative_difference

QUICK = {"name": "fedot", "rounds": 3, "lr": 1e-3, "tau": 20.0}


SCRIPT = """
import sys
import fedvlm
from fedvlm.runner import training
training.CHECKPOINT_SECONDS = 0.05
folder, store = sys.argv[1:]
settings = dict(seeds=[0, 1], encoder=f"store:{store}", selection="validation", fraction=0.7)
fedvlm.run(dict(name="fedot", rounds=60, lr=1e-3), out=folder, **settings)
"""


def test_kill_and_resume_give_the_same_bits(rows_like, files, tmp_path):
    store = save_store(tmp_path / "rows.safetensors", rows_like(dim=64))
    command = [sys.executable, "-c", SCRIPT]
    subprocess.run([*command, tmp_path / "whole", store], check=True)
    moments = random.Random(5)
    killed = 0
    for _ in range(5):
        process = subprocess.Popen([*command, tmp_path / "torn", store])
        manifest = tmp_path / "torn" / "manifest.json"
        while not manifest.exists() and process.poll() is None:
            sleep(0.01)
        sleep(moments.uniform(0, 1.5))
        process.kill()
        killed += process.wait() == -9
    assert killed >= 2, "the run was over before it could be killed"
    result = fedvlm.resume(tmp_path / "torn")
    assert files(result.folder) == files(tmp_path / "whole")
    leftovers = [path.name for path in (tmp_path / "torn").rglob("*") if path.suffix == ".checkpoint"]
    assert leftovers == []


SHELVED = """
import os, signal, sys
import fedvlm
from fedvlm.engines import batched, loop, state
from fedvlm.runner import training
folder, store = sys.argv[1:3]
at, loop.CLIENTS_PER_PART, workers = map(int, sys.argv[3:])
batched.make_chunks = lambda world, tasks, times: [[one] for one in tasks]
state.MAX_LOCAL_BYTES_IN_MEMORY = 0  # on disk
training.CHECKPOINT_SECONDS = 2.5  # a checkpoint at the third time, then the sixth
loop.LARGE_ROUND_BYTES = 0
put, times = state.ClientStateStore.put, 0
training.monotonic = lambda: times

def counted(self, many):
    global times
    if many:
        times += 1
    if times == at:  # in the middle of a round, one of its clients is written
        put(self, dict(list(many.items())[:1]))
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, many)

state.ClientStateStore.put = counted
if not at:  # after the last round: local tensors are in the record, scores are not
    training.write_json = lambda path, value: os.kill(os.getpid(), signal.SIGKILL)
settings = dict(encoder=f"store:{store}", protocol="own-test", fraction=0.7, workers=workers)
fedvlm.run(dict(name="fedot", blocks=4, rounds=8, lr=1e-3), out=folder, **settings)
"""


# All at once; uploads summed one by one; two by two, with the next two under way meanwhile.
@pytest.mark.parametrize(("part", "workers"), [(128, 1), (1, 1), (2, 2)])
def test_local_tensors_on_disk_give_the_same_bits_also_after_a_kill_in_mid_round(
    rows_like, files, tmp_path, monkeypatch, part, workers
):
    store = save_store(tmp_path / "rows.safetensors", rows_like(dim=16))
    method = {"name": "fedot", "blocks": 4, "rounds": 8, "lr": 1e-3}
    settings = {"encoder": f"store:{store}", "protocol": "own-test", "fraction": 0.7}
    settings["workers"] = workers
    monkeypatch.setattr(batched, "make_chunks", lambda world, tasks, times: [[task] for task in tasks])
    monkeypatch.setattr(loop, "CLIENTS_PER_PART", part)
    monkeypatch.setattr(loop, "LARGE_ROUND_BYTES", 0)
    memory = fedvlm.run(method, out=tmp_path / "memory", **settings)
    monkeypatch.setattr(states, "MAX_LOCAL_BYTES_IN_MEMORY", 0)
    fedvlm.run(method, out=tmp_path / "whole", **settings)
    command = [sys.executable, "-c", SHELVED, tmp_path / "torn", store]
    for at in (5, 4, 0):
        assert subprocess.run([*command, str(at), str(part), str(workers)]).returncode == -9
        assert (tmp_path / "torn" / "trainings").joinpath("0-all.local").exists()
    result = fedvlm.resume(tmp_path / "torn")
    assert files(result.folder) == files(tmp_path / "whole")
    assert files(result.folder)[0] == files(memory.folder)[0]  # its rounds
    (shared, local), (same, held) = (run.outcome("all") for run in (result, memory))
    assert max_relative_difference(shared, same) == 0 and list(local) == list(held)
    assert all(max_relative_difference(local[id], client_local) == 0 for id, client_local in held.items())
    assert not list((result.folder / "trainings").glob("*.local"))


def test_resume_of_rows_in_memory_says_what_to_do(rows, tmp_path):
    fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a")
    (tmp_path / "a" / "result.json").unlink()
    with pytest.raises(SettingsError, match="took its samples from memory; call fedvlm.run again"):
        fedvlm.resume(tmp_path / "a")


def test_resume_of_nothing_is_refused(tmp_path):
    with pytest.raises(DataError, match="is .* a run directory"):
        fedvlm.resume(tmp_path / "nothing")


def test_a_damaged_checkpoint_is_refused(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "CHECKPOINT_SECONDS", 0.0)

    def stop(*all):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainings, "finish_training", stop)
    with pytest.raises(KeyboardInterrupt):
        fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a")
    monkeypatch.undo()
    path = next((tmp_path / "a" / "trainings").glob("*.checkpoint"))
    body = bytearray(path.read_bytes())
    body[-5] ^= 1
    path.write_bytes(body)
    with pytest.raises(DataError, match="checkpoint is damaged"):
        fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a")


def test_a_disk_that_fills_up_in_mid_run_is_said_and_the_run_goes_on_later(rows, files, tmp_path, monkeypatch):
    fedvlm.run(QUICK, embedded=rows, out=tmp_path / "whole")
    writes_left = [3]

    def filling(handle, sync=os.fsync):
        writes_left[0] -= 1
        if writes_left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", filling)
        with pytest.raises(DataError, match="the disk is full at .* free some space and resume"):
            fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a")
    assert not (tmp_path / "a" / "result.json").exists()
    fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a")
    assert files(tmp_path / "a") == files(tmp_path / "whole")
