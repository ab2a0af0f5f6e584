"""Trainings on a cluster of real processes leave the record that one machine leaves."""

import subprocess
import sys

import pytest

from fedvlm.encoders.store import save_store
from fedvlm.errors import SettingsError
from fedvlm.runner import cluster

SCRIPT = '''
import os, signal, sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fedvlm.core import make
from fedvlm.runner import cluster
from fedvlm.runner.run import execute_all
from fedvlm.runner.settings import Settings

opened = cluster._client


def doom(note):
    """The first worker that has written a second checkpoint is killed, and leaves a note."""
    from fedvlm.runner import training

    write, times = training.write_tensors, []

    def once(path, *what):
        write(path, *what)
        times.append(path.suffix)
        if times[-2:] == [".checkpoint"] * 2:
            try:
                with open(note, "xb") as file:
                    file.write((path.parents[1] / "rounds.jsonl").read_bytes())
            except FileExistsError:  # by the other worker
                return
            os.kill(os.getpid(), signal.SIGKILL)

    training.CHECKPOINT_SECONDS, training.write_tensors = -1.0, once


@contextmanager
def client(on):
    with opened(on) as dask_client:
        assert dask_client.scheduler.address.startswith("tls://127.0.0.1:")
        dask_client.run(doom, sys.argv[2] + "/note")
        yield dask_client


def main():
    store, out = sys.argv[1:]
    cluster._client, cluster.count_cores = client, lambda: 2
    requests = []
    for where in ("here", "cluster", "address"):
        methods = [make("fedot", rounds=3, lr=1e-3), make("zero-shot")]
        options = dict(encoder=f"store:{store}", seeds=(0, 1), workers=1)
        requests.append([(Settings(method, **options), Path(out) / where / method.name) for method in methods])
    lines = [[], []]
    execute_all(requests[0], on_line=lambda *line: lines[0].append(line))
    samples_future = cluster._SampleOffer.samples_future
    cluster._SampleOffer.samples_future = None  # workers see the store, so no samples are sent
    for record in execute_all(requests[1], on_line=lambda *line: lines[1].append(line), cluster="dask"):
        assert not isinstance(record, Exception), record
    assert len(lines[0]) == len(lines[1]) == 18
    assert not list(Path(out).glob("cluster/*/away"))
    # What the killed worker did stands in the record, times and all: it went on from there.
    did = (Path(out) / "note").read_text().splitlines()
    assert len(did) == 2 and set(did) <= set(
        (Path(out) / "cluster" / "fedot" / "rounds.jsonl").read_text().splitlines()
    )
    # One that finds other rows there is sent those of the run.
    cluster._client, cluster._SampleOffer.samples_future = opened, samples_future
    strip_samples = cluster.strip_samples

    def other(settings, rows):
        bare, place = strip_samples(settings, rows)
        return bare, replace(place, digest="of other rows")

    cluster.strip_samples = other
    by_address(requests[2][1:], Path(out))


def by_address(requests, folder):
    """As a person would who has certificates in files, and a scheduler."""
    import dask
    from distributed import LocalCluster, Security

    made, files = Security.temporary(), {}
    for name in ("tls_ca_file", "tls_client_cert", "tls_client_key"):
        files[name] = folder / f"{name}.pem"
        files[name].write_text(getattr(made, name))
    tls = {"distributed.comm.tls.ca-file": str(files["tls_ca_file"])}
    for who in ("client", "worker", "scheduler"):
        tls[f"distributed.comm.tls.{who}.cert"] = str(files["tls_client_cert"])
        tls[f"distributed.comm.tls.{who}.key"] = str(files["tls_client_key"])
    with dask.config.set(tls):
        options = dict(n_workers=1, threads_per_worker=1, dashboard_address=None)
        with LocalCluster(host="127.0.0.1", protocol="tls", security=Security(), **options) as one:
            on = one.scheduler_address.replace("tls://", "dask://")
            (done,) = execute_all(requests, cluster=on)
            assert not isinstance(done, Exception), done


if __name__ == "__main__":
    main()
'''


@pytest.mark.deployed
def test_a_cluster_gives_the_same_record_though_a_worker_is_killed(rows_like, files, tmp_path):
    store = save_store(tmp_path / "rows.safetensors", rows_like())
    script = tmp_path / "script.py"  # a worker reads it again, so it is a file
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, store, tmp_path], capture_output=True, text=True, timeout=240)
    assert not done.returncode, done.stderr
    for name in ("fedot", "zero-shot"):
        assert files(tmp_path / "cluster" / name) == files(tmp_path / "here" / name)
    assert files(tmp_path / "address" / name) == files(tmp_path / "here" / name)


@pytest.mark.parametrize("on", ["ray://x:1", "tcp://10.0.0.1:8786", "dask://", "somewhere"])
def test_a_place_that_is_no_cluster_or_would_go_in_the_clear_is_refused(on):
    with pytest.raises(SettingsError, match=r"--on must be dask \(on this machine\), dask://HOST:PORT"):
        cluster.parse_address(on)


def test_the_way_to_another_machine_is_tls():
    assert cluster.parse_address("dask://lab:8786") == cluster.parse_address("tls://lab:8786")
    assert cluster.parse_address("dask://lab:8786") == "tls://lab:8786"
    assert cluster.parse_address("tcp://127.0.0.1:8786") == "tcp://127.0.0.1:8786"


def test_tls_without_a_certificate_is_refused():
    with (
        pytest.raises(SettingsError, match="no certificate is named; set distributed.comm.tls"),
        cluster._client("dask://127.0.0.1:1"),
    ):
        pass
